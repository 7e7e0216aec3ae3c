-- _subjects_put_in(queue, task, kinds, jobs, subjects, ...): put in what is new of a batch of subjects, with the
-- settings of _subjects_put. Writes scheduled, entry.
create or replace function tallybook._subjects_put_in(p_queue text, p_task text, p_kinds "char"[], p_jobs bigint[],
  p_subjects text[], p_args text[], p_run_ats timestamptz[], p_lanes int[], p_retentions "char"[], p_headers text[],
  p_options text[], p_carry jsonb[], p_places bigint[], p_max_attempts int, p_at timestamptz) returns void
language plpgsql as $$
declare
  v_now boolean; v_soon boolean;
begin
  with u as materialized (
    select u.place, u.job, u.subject, u.args::jsonb as args, u.run_at, u.lane, u.retention, u.headers::jsonb as headers,
           coalesce(u.options::jsonb, '{}')
             || jsonb_build_object('subject', coalesce(u.carry, '{"iterations": 0}')) as options,
           coalesce(u.run_at > p_at, false) as later
      from unnest(p_places, p_kinds, p_jobs, p_subjects, p_args, p_run_ats, p_lanes, p_retentions, p_headers, p_options,
                  p_carry) u(place, kind, job, subject, args, run_at, lane, retention, headers, options, carry)
     where u.kind in ('c', 'v')
  ), later as (
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, options)
    select u.job, u.run_at, p_at, u.lane, 1, 0, 0, p_max_attempts, p_task, u.args, u.headers, u.subject, u.options
      from u where u.later
  ), now as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, options)
    select nextval('tallybook.job_id'), o.job, p_at, o.lane, 1, o.retention, 0, 0, p_max_attempts, p_task, o.args,
           o.headers, o.subject, o.run_at, o.options
      from (select u.* from u where not u.later
            order by coalesce(u.run_at, p_at), u.place) o  -- the oldest first, then as they were given
  )
  select coalesce(bool_or(not u.later), false), coalesce(bool_or(u.later and u.run_at < p_at + interval '10 s'), false)
    into v_now, v_soon from u;
  perform tallybook._wake(p_queue) where v_now;
  perform tallybook._wake(' promote') where v_soon;
end $$;
