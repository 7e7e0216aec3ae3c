-- rebase(cursors, at, as_service): make the lanes of a database from another cluster claimable in this one.
--
-- Transaction ids are valid only in their cluster, so the cursors are invalid after a dump and restore, a logical
-- replication or pg_upgrade. Workers call this at their start, at each new connection and every few seconds; in the
-- recorded cluster it costs 0.1 ms and does nothing.
--   cursors  check them as well: for data that came without the row in installation, and after TB004
--   at       the time; for tests
--   as_service  claim the run first, and record it (see _service.sql); rebased is null if another session runs it
-- In another cluster the first call does this once, and the others wait for it:
-- - every lane gets a successor and is retired; scheduled, waiting and dead jobs point to the successor;
-- - every entry without an outcome is appended again: as moved, or as lost if a worker of the other cluster had claimed
--   it. No crash is counted, because the job did not kill the worker. Cancelled ones end as cancelled;
-- - the recorded workers are ended: a worker that followed the move registers again, and outcomes that it sends for its
-- old attempts are refused;
-- - sequences that were not copied are set past all numbers in use, and the cluster is recorded.
-- No producer waits. Jobs of transactions that began earlier, in a retired lane, are moved by later calls.
-- Returns rebased (whether this call did all that), the number of lanes, of attempts that were moved, lost and
-- cancelled, of scheduled, waiting and dead jobs, and of recorded workers; late: jobs moved from retired lanes. Errors:
-- TB003: a needed rebase requires READ COMMITTED. Takes the lock of migrate, then the gates of all workers.
-- profile: whole
-- rights: worker
create or replace function tallybook.rebase(cursors boolean default false, at timestamptz default clock_timestamp(),
  as_service boolean default false, out rebased boolean, out lanes int, out moved int, out lost int, out cancelled int,
  out scheduled int, out waiting int, out dead int, out workers int, out late int)
language plpgsql
-- All of a ledger is read, without statistics where it has just been restored.
set enable_nestloop = off  -- it reads everything once
as $$
declare s pg_snapshot; v_old int[]; v_new int[]; v_xids xid8[]; v_seqs bigint[]; v_workers text[];
begin
  rebased := false; lanes := 0; moved := 0; lost := 0; cancelled := 0; scheduled := 0; waiting := 0; dead := 0;
  workers := 0; late := 0;
  if as_service and not tallybook._service_claim('rebase', at) then rebased := null; return; end if;
  if not tallybook._is_foreign_cluster(cursors) then
    if exists (select from tallybook.lane l where l.retired_at is not null)
       then late := tallybook._rebase_late(at); end if;
    if as_service then perform tallybook._service_ran('rebase', at, late); end if;
    return;
  end if;
  perform tallybook._read_committed('rebase needs READ COMMITTED, this transaction is %s',
    'This database came from another cluster. Run "tallybook migrate", or call rebase() in a transaction of its own.');
  perform pg_advisory_xact_lock(1413565440, 0);
  if not tallybook._is_foreign_cluster(cursors) then return; end if;  -- another session was faster

  -- No claim runs from here on: each holds the gate of a recorded worker; a registration passes here first.
  perform pg_advisory_xact_lock(1413565442, w.id) from (select k.id from tallybook.worker k where k.ended_at is null
                                                        order by k.id) w;
  select array_agg(r.xid), array_agg(r.seq), array_agg(r.worker) into v_xids, v_seqs, v_workers
         from tallybook._left_running() r;
  update tallybook.worker w set ended_at = rebase.at where w.ended_at is null;
  get diagnostics workers = row_count;

  perform tallybook._renumber();
  s := pg_current_snapshot();  -- later commits are late
  select array_agg(l.lane_id) into v_old from tallybook.lane l;
  -- Producers use the newest twin, which has the queue's present class and order.
  insert into tallybook.lane (queue, priority, part, retention, shuffled)
  select d.queue, d.priority, d.part, d.retention, d.shuffled from (
    select distinct l.queue, l.priority, l.part, l.retention, l.shuffled from tallybook.lane l
     where l.lane_id = any (v_old)) d
    left join tallybook.queue q on q.name = d.queue
   order by (d.retention = coalesce(left(q.retention, 1), 'd')::"char")::int
            + (d.shuffled = coalesce(q.random_order, false))::int;
  get diagnostics lanes = row_count;
  update tallybook.lane l set retired_at = coalesce(l.retired_at, rebase.at), born = pg_snapshot_xmin(s)
    where l.lane_id = any (v_old);
  -- One successor each, also if a producer has just created a twin.
  select array_agg(m.old), array_agg(m.new) into v_old, v_new from (
    select distinct on (o.lane_id) o.lane_id as old, n.lane_id as new
      from tallybook.lane o
      join tallybook.lane n on n.queue = o.queue and n.priority = o.priority and n.part = o.part
           and n.retention = o.retention
       and n.lane_id <> all (v_old)
     where o.lane_id = any (v_old) order by o.lane_id, n.lane_id) m;

  select b.moved, b.lost, b.cancelled into moved, lost, cancelled
    from tallybook._rebase_entries(v_old, v_new, null, null, v_xids, v_seqs, v_workers, at) b;
  -- _count_moved does not count these moves: they are recounted.
  -- Rows locked by a user's transaction stay, and move when they are promoted, released or retried.
  with moved as (
    select * from unnest(v_old, v_new) m(old, new)
  ), s as (
    update tallybook.scheduled k set lane_id = m.new from moved m, (
      select f.job_id, f.lane_id from tallybook.scheduled f where f.lane_id = any (v_old) for update skip locked) f
     where m.old = f.lane_id and k.job_id = f.job_id returning 1
  ), d as (
    update tallybook.dead k set lane_id = m.new from moved m, (
      select f.job_id, f.lane_id from tallybook.dead f where f.lane_id = any (v_old) for update skip locked) f
     where m.old = f.lane_id and k.job_id = f.job_id returning 1
  ), w as (
    update tallybook.waiting k set lane_id = m.new from moved m, (
      select f.job_id, f.lane_id from tallybook.waiting f where f.lane_id = any (v_old) for update skip locked) f
     where m.old = f.lane_id and k.job_id = f.job_id returning 1
  )
  select (select count(*) from s), (select count(*) from d), (select count(*) from w) into scheduled, dead, waiting;

  update tallybook.installation i set system_identifier = c.system_identifier from pg_control_system() c;
  perform tallybook.recount(at);
  perform tallybook._wake(q) from (select distinct l.queue from tallybook.lane l where l.lane_id = any (v_new)
                                   order by 1) d(q);
  rebased := true;
  if as_service then perform tallybook._service_ran('rebase', at, moved + lost + cancelled); end if;
end $$;
