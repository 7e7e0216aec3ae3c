-- rescue(lease_time, ...): give back the work of dead workers. Returns how many attempts were lost, and how many
-- workers are suspects: their session is gone, look again after grace.
--
-- A worker is dead when it has sent no heartbeat for its own lease (or lease_time, if given) and two looks have found
-- it silent, the second a third of the lease after the first: the server itself may have been away. For a worker
-- without a session the first of these looks counts from half the lease on, since nothing else shows its death: it is
-- rescued when its lease ends.
-- A worker that holds a session is also dead when the session is gone and still gone at a look grace later (a worker
-- that lost its connection takes the lock again by then). After a start of the server everybody has a whole lease to be
-- heard again. No running job is taken from a worker that beats, however long it runs. Where a lease ran out while
-- nobody looked, because the clock has stepped forward or no worker was there, a worker that may live has a whole lease
-- from the first look on.
-- An attempt of a dead worker ends as lost and its job goes back in line with one more crash; at max_crashes, and if
-- the worker held nothing else, it becomes a dead letter with the reason crashed (see _lost). What a zombie still tries
-- is refused: the outcome is there.
-- Worker by worker with a try of its gate, so that a claim in flight is never scanned past; job by job in the order of
-- their ids with a lock timeout, so that one zombie's uncommitted end does not hold up the others. A dead worker stays
-- on record until nothing of it is open.
-- as_service: claim the run first, and put it on record (see _service.sql); lost is null where somebody else is running
-- it.
-- Reads worker, claim, entry; writes outcome, entry, dead, worker, service.
-- rights: worker
create or replace function tallybook.rescue(lease_time interval default null, grace interval default '1 s',
  max_crashes int default 3, at timestamptz default clock_timestamp(), only_worker int default null,
  as_service boolean default false, out lost int, out suspects int)
language plpgsql
-- profile: nested
set lock_timeout = '200ms'  -- what is locked comes with the next run
as $$
declare
  w record; c record; e tallybook.entry; v_left boolean; v_error jsonb; v_free boolean; v_lease interval;
  -- A start that lies ahead: the clock has stepped back since, and each note is newer than the start (see _clock_back).
  v_start timestamptz := case when pg_postmaster_start_time() <= at then pg_postmaster_start_time()
                              else '-infinity' end;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'rescue needs READ COMMITTED' using errcode = 'TB003',
      hint = 'An older snapshot overlooks the newest claims.';
  end if;
  if as_service and not tallybook._service_claim('rescue', at) then return; end if;
  lost := 0; suspects := 0;
  for w in select k.id, k.name, k.session, k.gone_at, k.seen_at, k.open_from, k.lease from tallybook.worker k
            where k.ended_at is null and (only_worker is null or k.id = only_worker) order by k.id loop
    v_lease := coalesce(lease_time, w.lease);
    -- Silence alone proves nothing: the server itself may have been away. Silent, and still silent a grace after it was
    -- noticed.
    -- Let go at once: a worker that comes back takes this lock.
    v_free := w.session and pg_try_advisory_lock(1413565443, w.id) and pg_advisory_unlock(1413565443, w.id);
    if w.seen_at >= at - (case when w.session then v_lease else v_lease / 2 end) then
      continue when not w.session;
      if not v_free then  -- its session is there
        if w.gone_at is not null then
          update tallybook.worker k set gone_at = null
           where k.id = (select x.id from tallybook.worker x where x.id = w.id
                         and x.gone_at = w.gone_at for update skip locked);
        end if;
        continue;
      end if;
    end if;
    -- Not heard since the server started: nobody could be. Its silence counts from there, and its session proves
    -- nothing.
    if w.seen_at > '-infinity' and w.seen_at < v_start and at between v_start and v_start + v_lease then
      suspects := suspects + 1;
      continue;
    end if;
    if w.seen_at > '-infinity' then
      if w.gone_at is null or w.gone_at < v_start then  -- a note from before an outage proves nothing
        update tallybook.worker k set gone_at = rescue.at
         where k.id = (select x.id from tallybook.worker x where x.id = w.id and x.seen_at = w.seen_at
                       and x.gone_at is not distinct from w.gone_at for update skip locked);
        suspects := suspects + 1;
        continue;
      end if;
      if w.gone_at > at - (case when w.session and w.seen_at >= at - v_lease then grace
                                when w.gone_at - w.seen_at > 2 * v_lease and not v_free then greatest(grace, v_lease)
                                else greatest(grace, v_lease / 3) end)
         or not w.session and w.seen_at >= at - v_lease then
        suspects := suspects + 1;
        continue;
      end if;
    end if;
    continue when not pg_try_advisory_xact_lock(1413565442, w.id);
    -- Looked at again behind the gate: a heartbeat may have come in between.
    perform from tallybook.worker k where k.id = w.id and k.ended_at is null
            and k.seen_at = w.seen_at for update skip locked;
    continue when not found;
    v_left := false;
    for c in select h.*, count(*) over () = 1 as alone from tallybook._open_attempts(w.id, w.open_from) h
      order by h.job_id, h.attempt loop
      begin
        v_error := jsonb_build_object('attempt', c.attempt, 'at', at, 'type', 'WorkerLost', 'worker', w.name,
                                      'started_at', (select k.claimed_at from tallybook._claim_of(c.lane_id,
                                          c.retention, c.xid, c.seq) k),
                                      'message', format('worker %s died, or could not be reached', w.name));
        insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
        values (c.xid, c.seq, c.job_id, at, c.retention, 'lost', v_error)
        on conflict do nothing;
        continue when not found;
        select x.* into strict e from tallybook.entry x
         where x.lane_id = c.lane_id and x.retention = c.retention and x.xid = c.xid and x.seq = c.seq;
        insert into tallybook.tally (lane_id, n, attempts, what, task) values (e.lane_id, 1, e.attempt, 'lost', e.task);
        perform tallybook._lost(tallybook._amended(e, at), v_error, at, max_crashes, c.alone, interval '0');
        lost := lost + 1;
      exception when lock_not_available then
        v_left := true;
      when others then  -- one job that cannot be put back must not hold up the others
        v_left := true;
        raise warning 'job % of worker % cannot be rescued: %', c.job_id, w.name, sqlerrm;
      end;
    end loop;
    if not v_left then
      update tallybook.worker k set ended_at = rescue.at where k.id = w.id;
    end if;
  end loop;
  if exists (select from tallybook.waiting) then perform tallybook._release_missed(at); end if;
  -- Amendments of jobs that have ended; a cancelled one may be retried, with what it was changed to.
  if exists (select from tallybook.amendment) then
    delete from tallybook.amendment a using (
      select k.job_id from tallybook.amendment k
       where not tallybook._job_open(k.job_id)
         and (select x.job_id from tallybook.entry x left join tallybook.outcome o
                on o.retention = x.retention and o.entry_xid = x.xid and o.entry_seq = x.seq
               where x.job_id = k.job_id and coalesce(o.state, 'cancelled') = 'cancelled' limit 1) is null
         and not exists (select from tallybook.scheduled s where s.job_id = k.job_id)
         and not exists (select from tallybook.waiting s where s.job_id = k.job_id)
       limit 1000 for update skip locked) k
     where a.job_id = k.job_id;
  end if;
  -- Tombstones of jobs that have ended. Never waits: a user's open transaction may hold one.
  delete from tallybook.tombstone t using (
    select k.job_id, k.attempt from tallybook.tombstone k
     where k.created_at < at - interval '1 min'
       and not exists (select from tallybook.scheduled s where s.job_id = k.job_id)
       and not exists (select from tallybook.waiting s where s.job_id = k.job_id)
       and not exists (select from tallybook.entry x where x.job_id = k.job_id
                          and (not exists (select from tallybook.outcome o
                                            where o.retention = x.retention and o.entry_xid = x.xid
                                                  and o.entry_seq = x.seq)
                               or k.taken and x.attempt = k.attempt and not tallybook._cursor_passed(x.lane_id,
                                   x.retention, x.xid, x.seq)))
     limit 1000 for update skip locked) k
   where t.job_id = k.job_id and t.attempt = k.attempt;
  if as_service then perform tallybook._service_ran('rescue', at, lost); end if;
end $$;
