-- _limited_jobs(leases, job_ids, attempts, names): the attempts that the caller owns, in the order in which limits let
-- them start, each with its keys: `names`, or those of its own limits, its queue and its task.
-- Reads claim, entry, outcome, lane, the rules.
-- profile: nested
create or replace function tallybook._limited_jobs(p_leases uuid[], p_job_ids bigint[], p_attempts int[],
  p_names text[])
returns setof tallybook._limited_job language plpgsql stable
set enable_memoize = off  -- each row is looked up once: there is nothing to remember
as $$
declare v_wide boolean := tallybook._has_limits(true);
begin
  return query
  select f.lease, k.job_id, k.attempt, k.lane_id, k.retention, k.xid, k.seq, l.priority::int,
         l.priority < 2 or coalesce(e.options ? 'turn', false) as front, e.unique_key is not null,
         case when p_names is null and not v_wide and jsonb_array_length(e.options -> 'limits') = 1
              then array[e.options -> 'limits' ->> 0]
              else array(select n from jsonb_array_elements_text(
                           case when p_names is not null then to_jsonb(p_names)
                                else coalesce(e.options -> 'limits', '[]')
                                     || case when v_wide then tallybook._wide_limits(l.queue, e.task) else '[]' end
                           end) with ordinality u(n, place) group by n order by min(place)) end,
         null::timestamptz, null::text
    from tallybook._lease_entries(p_leases, p_job_ids, p_attempts) k
    join unnest(p_leases, p_job_ids, p_attempts) f(lease, job_id, attempt) on f.job_id = k.job_id
         and f.attempt = k.attempt
    cross join lateral (
      select x.task, x.options, x.unique_key from tallybook.entry x
       where x.lane_id = k.lane_id and x.retention = k.retention and x.xid = k.xid and x.seq = k.seq limit 1) e
    join tallybook.lane l on l.lane_id = k.lane_id
   where not exists (select from tallybook._outcome_of(k.retention, k.xid, k.seq))
   order by front desc, l.priority, k.xid, k.seq;
end $$;
