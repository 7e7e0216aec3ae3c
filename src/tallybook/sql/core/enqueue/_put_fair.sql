-- _put_fair(ids, lanes, ...): set aside the due jobs of an enqueue_many that have a fair key. They wait for their turn
-- among the keys of their queue; see fair_release. Jobs with other keys are already stored.
create or replace function tallybook._put_fair(p_ids bigint[], p_lanes int[], p_tasks text[], p_args text[],
  p_run_ats timestamptz[], p_unique_keys text[], p_max_attempts int[], p_headers text[], p_expires_ats timestamptz[],
  p_options text[], p_now timestamptz) returns void
language plpgsql as $$
begin
  insert into tallybook.waiting (job_id, waits_since, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                 task, args, headers, expires_at, options, fair_key, fair_seq)
  select f.id, p_now, p_now, l.fair_id, 1, 0, 0, f.max_attempts, f.task, f.args::jsonb, f.headers::jsonb,
         f.expires_at, f.options::jsonb, f.options::jsonb ->> 'fair_key', f.id
    from unnest(p_ids, p_lanes, p_tasks, p_args, p_run_ats, p_unique_keys, p_max_attempts, p_headers, p_expires_ats,
                p_options) as f(id, lane, task, args, run_at, key, max_attempts, headers, expires_at, options)
    join (select d.id, tallybook._lane_beside(d.id, 'fair') from (select distinct u from unnest(p_lanes) u) d(id))
      l(id, fair_id) on l.id = f.lane
   where f.key is null and (f.run_at is null or f.run_at <= p_now) and f.options::jsonb ? 'fair_key';
  if found then perform tallybook._wake(' fair_release'); end if;
end $$;
