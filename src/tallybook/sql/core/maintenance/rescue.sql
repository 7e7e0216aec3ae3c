-- rescue(lease_time, ...): return the jobs of dead workers to their lanes. Returns how many attempts were lost, and how
-- many workers are suspects: their session is gone, so check again after grace.
--
-- A worker is dead when it has sent no heartbeat for its own lease (or lease_time, if given) and two checks have found
-- it silent, the second a third of the lease after the first, because the server itself may have been away. For a
-- worker without a session the first of these checks counts from half the lease on, since nothing else shows its death:
-- it is rescued when its lease ends.
-- A worker that holds a session is also dead when the session is gone and still gone at a check grace later; a worker
-- that lost its connection takes the lock again by then. After a start of the server, each worker has a whole lease to
-- send a heartbeat. No running job is taken from a worker that sends heartbeats, however long it runs. If a lease
-- expired while nobody checked, because the clock has stepped forward or no worker was there, a worker that may live
-- has a whole lease from the first check on.
-- An attempt of a dead worker ends as lost, and its job returns to its lane with one more crash. At max_crashes, if the
-- worker held no other job, it becomes a dead letter with the reason crashed (see _lost). Any outcome that such a
-- worker still sends is refused, because the attempt already has one.
-- It handles one worker after the other, and skips a worker whose gate is locked, so that it never misses an open
-- claim. It handles a worker's jobs in the order of their ids, with a lock timeout, so that one uncommitted end does
-- not delay the others. A dead worker keeps its row until none of its attempts is open.
-- as_service: claim the run first, and record it (see _service.sql); lost is null if another session is running it.
-- max_jobs: checks no further worker once this many attempts were lost; call again while lost is at least max_jobs. All
-- attempts of one worker end together, because a job that was rescued alone would count as the one that killed the
-- worker.
-- Also releases jobs that no end has released, and deletes amendments and tombstones that are used up: see
-- _release_missed, _forget_amendments, _forget_tombstones.
-- Errors: TB003 isolation level, TB005 max_jobs below 1.
-- Reads worker, claim, entry; writes outcome, tally, entry, dead, worker, service; deletes from waiting, amendment,
-- tombstone.
-- profile: nested
-- rights: worker
create or replace function tallybook.rescue(lease_time interval default null, grace interval default '1 s',
  max_crashes int default 3, at timestamptz default clock_timestamp(), only_worker int default null,
  as_service boolean default false, max_jobs int default null, out lost int, out suspects int)
language plpgsql
set lock_timeout = '200ms'  -- what is locked comes with the next run
as $$
declare w tallybook.worker; l record;
begin
  perform tallybook._read_committed('rescue needs READ COMMITTED', 'An older snapshot overlooks the newest claims.');
  perform tallybook._check_range('max_jobs', max_jobs::text, coalesce(max_jobs > 0, true), 'It must be at least 1.');
  if as_service and not tallybook._service_claim('rescue', at) then return; end if;
  lost := 0; suspects := 0;
  for w in select k.* from tallybook.worker k
            where k.ended_at is null and (only_worker is null or k.id = only_worker) order by k.id loop
    exit when lost >= max_jobs;
    case tallybook._worker_fate(w, coalesce(lease_time, w.lease), grace, at)
      when 'lives' then continue;
      when 'suspect' then
        suspects := suspects + 1;
        continue;
      else null;
    end case;
    continue when not pg_try_advisory_xact_lock(1413565442, w.id);
    -- Looked at again behind the gate: a heartbeat may have come in between.
    perform from tallybook.worker k where k.id = w.id and k.ended_at is null
            and k.seen_at = w.seen_at for update skip locked;
    continue when not found;
    select x.* into l from tallybook._rescue_attempts(w, max_crashes, at) x;
    lost := lost + l.lost;
    if not l.rest then update tallybook.worker k set ended_at = rescue.at where k.id = w.id; end if;
  end loop;
  if exists (select from tallybook.waiting) then perform tallybook._release_missed(at); end if;
  perform tallybook._forget_amendments();
  perform tallybook._forget_tombstones(at);
  if as_service then perform tallybook._service_ran('rescue', at, lost); end if;
end $$;
