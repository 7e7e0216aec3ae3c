-- _subjects_put_in(queue, task, scope, max_attempts, at, wanted, found): enqueue the new jobs of a batch of subjects.
-- With the settings of _subjects_put. Writes scheduled, entry.
create or replace function tallybook._subjects_put_in(p_queue text, p_task text, p_scope text, p_max_attempts int,
  p_at timestamptz, p_wanted tallybook._wanted_subject[], p_found tallybook._found_subject[]) returns void
language plpgsql as $$
declare
  v_now boolean; v_soon boolean;
  v_scope jsonb := case when p_scope = '' then '{}' else jsonb_build_object('scope', p_scope) end;
begin
  with u as materialized (
    select u.place, u.job_id, u.subject, u.args::jsonb as args, u.run_at, u.lane_id, u.retention,
           u.headers::jsonb as headers, coalesce(u.options::jsonb, '{}')
             || jsonb_build_object('subject', coalesce(u.carry, '{"iterations": 0}') || v_scope) as options,
           coalesce(u.run_at > p_at, false) as later
      from unnest(p_wanted, p_found) u where u.kind in ('c', 'v')
  ), later as (
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, options)
    select u.job_id, u.run_at, p_at, u.lane_id, 1, 0, 0, p_max_attempts, p_task, u.args, u.headers, u.subject, u.options
      from u where u.later
  ), now as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, options)
    select nextval('tallybook.job_id'), o.job_id, p_at, o.lane_id, 1, o.retention, 0, 0, p_max_attempts, p_task, o.args,
           o.headers, o.subject, o.run_at, o.options
      from (select u.* from u where not u.later
            order by coalesce(u.run_at, p_at), u.place) o  -- the oldest first, then as they were given
  )
  select coalesce(bool_or(not u.later), false), coalesce(bool_or(u.later and u.run_at < p_at + interval '10 s'), false)
    into v_now, v_soon from u;
  perform tallybook._wake(p_queue) where v_now;
  perform tallybook._wake(' promote') where v_soon;
end $$;
