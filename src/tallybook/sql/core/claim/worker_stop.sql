-- worker_stop(worker): unregister a worker that has ended all its attempts. Attempts that are still open are rescued;
-- returns their number. Errors: TB003. Writes worker; see rescue.
-- rights: worker
create or replace function tallybook.worker_stop(worker int, at timestamptz default clock_timestamp()) returns int
language plpgsql as $$
begin
  update tallybook.worker w set seen_at = '-infinity' where w.id = worker_stop.worker and w.ended_at is null;
  return r.lost from tallybook.rescue(at => worker_stop.at, only_worker => worker_stop.worker) r;
end $$;
