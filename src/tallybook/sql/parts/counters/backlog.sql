-- backlog(): return the number of open jobs and dead letters per queue and state, and the time from which the oldest of
-- them could run.
--
-- For a metrics collector, which may call it every second. The numbers come from the counters: see counts.
--   oldest_run_at  the earliest time from which one of these jobs could run, or can. Of available jobs, only the first
--                  of each lane is read. Of scheduled and retrying jobs, only the 1,000 of all queues that are due
--                  first are read; of waiting and dead jobs, only the 1,000 with the lowest ids. Null if none of these
--                  belongs to this queue, and for running jobs
-- Reads what counts reads, the first job of each lane, and the first rows of scheduled, waiting and dead.
-- profile: hot
-- rights: worker, operator, reader, metrics
create or replace function tallybook.backlog(out queue text, out state text, out jobs bigint,
  out oldest_run_at timestamptz)
returns setof record language plpgsql stable as $$
begin
  return query
  with n as materialized (
    select l.queue, c.what, sum(c.n)::bigint as jobs from tallybook._counted_of(null) c
           join tallybook.lane l on l.lane_id = c.lane_id
     where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead')
           group by l.queue, c.what having sum(c.n) <> 0
  ), first as (
    select l.queue, x.what, min(x.run_at) as run_at
      from ((select s.lane_id, case when s.failures > 0 then 'retrying' else 'scheduled' end as what, s.run_at
               from tallybook.scheduled s order by s.run_at limit 1000)
            union all
            (select w.lane_id, 'waiting', coalesce(w.run_at, w.enqueued_at) from tallybook.waiting w order by w.job_id
             limit 1000)
            union all
            (select d.lane_id, 'dead', d.enqueued_at from tallybook.dead d order by d.job_id limit 1000)) x
      join tallybook.lane l on l.lane_id = x.lane_id group by l.queue, x.what
  )
  select n.queue, n.what, n.jobs, case when n.what = 'available' then tallybook._oldest(n.queue) else f.run_at end
    from n left join first f on f.queue = n.queue and f.what = n.what order by n.queue, n.what;
end $$;
