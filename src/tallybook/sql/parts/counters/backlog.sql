-- backlog(): how many jobs of each queue are in each state that is not an end, and since when the oldest of them could
-- run.
--
-- For a metrics collector, which may call it every second. Includes dead letters. The numbers come from the counters:
-- see counts.
--   oldest_run_at  the earliest time from which one of them could or can run. Only the head of the queue's lines is
--                  read, and of all queues the 1,000 that are due first (scheduled, retrying) or have the lowest ids
--                  (waiting, dead). Null if none of these is of this queue, and for running jobs
-- Reads what counts reads, the head of each line, and those of scheduled, waiting and dead.
-- profile: hot
-- rights: worker, operator, reader, metrics
create or replace function tallybook.backlog(out queue text, out state text, out jobs bigint,
  out oldest_run_at timestamptz)
returns setof record language plpgsql stable as $$
begin
  return query
  with n as materialized (
    select l.queue, c.what, sum(c.n)::bigint as jobs from tallybook._counted() c
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
