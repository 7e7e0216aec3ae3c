-- running(max_jobs, of_worker): list the running jobs, longest first, of all workers or of one.
--
-- Reads the open attempts of each worker from its watermark on, so the cost does not depend on the length of the
-- history. Errors: TB005 max_jobs out of range. Reads worker, claim, entry, outcome, lane.
-- profile: nested
-- rights: operator, reader
create or replace function tallybook.running(max_jobs int default 20, of_worker int default null)
returns table (job_id bigint, attempt int, queue text, task text, worker_id int, worker text, started_at timestamptz)
  language plpgsql stable
set enable_nestloop = on  -- also if the caller has switched it off
as $$
begin
  perform tallybook._check_range('max_jobs', running.max_jobs::text, running.max_jobs between 1 and 100000,
                                 'It must be from 1 to 100000.');
  return query
  select o.job_id, o.attempt, l.queue, e.task, w.id, w.name, c.claimed_at
    from tallybook.worker w
    cross join lateral tallybook._open_attempts(w.id, w.open_from) o
    cross join lateral (select x.task from tallybook.entry x
                         where x.lane_id = o.lane_id and x.retention = o.retention and x.xid = o.xid and x.seq = o.seq
                               limit 1) e
    cross join lateral (select n.queue from tallybook.lane n where n.lane_id = o.lane_id limit 1) l
    left join lateral tallybook._claim_of(o.lane_id, o.retention, o.xid, o.seq) c on true
   where w.ended_at is null and (running.of_worker is null or w.id = running.of_worker)
   order by c.claimed_at, o.job_id limit running.max_jobs;
end $$;
