-- worker_start(name, queues, tasks, session): register a worker. Returns its id, which claim and renew take.
--
--   tasks    the names of its tasks; it also claims jobs of these tasks that were set aside for workers that know them
--            (see move)
--   lease    how long it may send no heartbeat before others consider it dead
--   catalogue  its tasks, as JSON: [{"name", "app", "definition", ...}]; stored in tallybook.task for people
--   slots, version  for people: how many jobs of each queue run at once, in the order of queues; the package's version
--   session  true: it holds the advisory lock (1413565443, id) in shared mode on the session that renews, so that its
--            death is noticed at once
-- Always commits durably. If a crash could undo it, another worker might get the same id, and the jobs of the one that
-- died first would never be rescued. Creates missing queues. A database that came from another cluster is rebased
-- first, so no worker ever meets a cursor of another cluster. Errors: TB005 an invalid name of a queue; TB003 a needed
-- rebase at another isolation level than READ COMMITTED. Writes worker, queue, task; see rebase.
-- rights: worker
create or replace function tallybook.worker_start(name text, queues text[], tasks text[] default '{}',
  session boolean default false, at timestamptz default clock_timestamp(), lease interval default '30 s',
  catalogue jsonb default null, slots int[] default null, version text default null)
returns int language plpgsql as $$
declare v_id int; v_first int := (('x' || tallybook._timeline())::bit(32)::int - 1) % 1000 * 1000000;
begin
  perform set_config('synchronous_commit', 'on', true) where current_setting('synchronous_commit') = 'off';
  perform tallybook._check_name('queue', q, 64) from unnest(queues) q;
  perform tallybook.rebase(at => worker_start.at);
  insert into tallybook.queue (name) select distinct q from unnest(queues) q order by q on conflict do nothing;
  -- A failover can set the numbers back, and two that live under one number could never be told from each other: each
  -- timeline has its own million. The gate of a number that nobody has yet keeps apart who comes first.
  if v_first > 0 and not exists (select from tallybook.worker w where w.id > v_first) then
    perform pg_advisory_xact_lock(1413565442, v_first);
    if not exists (select from tallybook.worker w where w.id > v_first) then
      perform setval(pg_get_serial_sequence('tallybook.worker', 'id'), v_first);
    end if;
  end if;
  insert into tallybook.worker (name, queues, tasks, parts, session, lease, started_at, seen_at, slots, version)
  values (worker_start.name, worker_start.queues, worker_start.tasks, array(
            select unnest(array['turn', 'fair'])  -- what comes back to a limit; whose turn among the keys has come
            union all
            select 'task:' || t from unnest(worker_start.tasks) t
            union all  -- args of these versions, put aside by workers that did not know them
            select format('version:%s:%s', v, n.name) from jsonb_to_recordset(worker_start.catalogue) c(name text,
                version int, aliases text[]),
                   unnest(c.name || coalesce(c.aliases, '{}')) n(name), generate_series(2, c.version) v),
          worker_start.session, worker_start.lease, worker_start.at, worker_start.at, worker_start.slots,
          left(worker_start.version, 100))
  returning id into v_id;
  if catalogue is not null then perform tallybook._register(catalogue, at); end if;
  return v_id;
end $$;
