-- worker_start(name, queues, tasks, session): put a worker on record. Returns its id, which claim and renew name.
--
--   tasks    the names of the tasks that it knows: it also walks the parts of its queues where jobs of these were put aside
--   lease    how long it may be silent before the others take it for dead
--   session  it holds the advisory lock (1413565443, id) in shared mode on the session that renews, so that its death is seen at once
-- Makes the queues that are not there yet. Writes worker, queue.
create or replace function tallybook.worker_start(name text, queues text[], tasks text[] default '{}', session boolean default false,
  at timestamptz default clock_timestamp(), lease interval default '30 s')
returns int language plpgsql as $$
declare
  v_id int;
begin
  perform tallybook._check_name('queue', q, 64) from unnest(queues) q;
  insert into tallybook.queue (name) select distinct q from unnest(queues) q order by q on conflict do nothing;
  insert into tallybook.worker (name, queues, tasks, parts, session, lease, started_at, seen_at)
  values (worker_start.name, worker_start.queues, worker_start.tasks, array(select 'task:' || t from unnest(worker_start.tasks) t),
          worker_start.session, worker_start.lease, worker_start.at, worker_start.at)
  returning id into v_id;
  return v_id;
end $$;

-- worker_stop(worker): take a worker off record that has ended all it had claimed. What it left open is rescued.
create or replace function tallybook.worker_stop(worker int, at timestamptz default clock_timestamp()) returns int
language plpgsql as $$
begin
  update tallybook.worker w set seen_at = '-infinity' where w.id = worker_stop.worker and w.ended_at is null;
  return r.lost from tallybook.rescue(at => worker_stop.at, only_worker => worker_stop.worker) r;
end $$;
