-- _start_waits(job_id, task): keeps a queued job that is claimed from now on from starting before the caller's
-- transaction has ended.
--
-- The caller reads the job after this call. Either it sees the claim, or the start sees the lock (see _amendment_state)
-- and waits. All these locks are shared and held until commit, and a start only tries them, so producers wait neither
-- for each other nor for workers.
-- A pick reads its jobs before its claim commits. So while a pick is open (lock 65 of class 1413565446), the caller
-- waits until no claim of the job's lane is open. Then either the claim can be seen, or the pick sees the lock. The
-- lane's lock is taken in a subtransaction, whose rollback gives it back: claims do not wait for the caller.
-- One lock for each of the first 128 jobs (class 1413565447). A server has room for a few thousand locks only, so a
-- transaction that changes more jobs takes one of 64 locks of the task instead (class 1413565446). Until it has ended,
-- no queued job of this task with a unique key or a subject starts. Lock 0 of that class shows that such a transaction
-- exists.
create or replace function tallybook._start_waits(p_job_id bigint, p_task text) returns void
language plpgsql as $$
begin
  if tallybook._locks_left('tallybook.jobs_locked', 128) then
    perform pg_advisory_xact_lock_shared(1413565447, hashint8(p_job_id));
  else
    perform pg_advisory_xact_lock_shared(1413565446, 0);
    perform pg_advisory_xact_lock_shared(1413565446, 1 + (hashtext(p_task) & 63));
  end if;
  perform tallybook._pick_waited(p_job_id);
end $$;

-- _pick_waited(job_id): while a pick is open, wait until no claim of the job's lane is open. False: there was no pick,
-- or the job is not in line.
create or replace function tallybook._pick_waited(p_job_id bigint) returns boolean
language plpgsql as $$
declare v_lane int;
begin
  if pg_try_advisory_lock(1413565446, 65) and pg_advisory_unlock(1413565446, 65) then return false; end if;
  select e.lane_id into v_lane from tallybook._newest_entry(p_job_id) e
   where not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq));
  if not found then return false; end if;
  begin  -- only here: without a pick there is no subtransaction
    perform pg_advisory_xact_lock_shared(1413565441, v_lane);
    raise sqlstate 'TB000';
  exception when sqlstate 'TB000' then return true;
  end;
end $$;

-- _crowd(): whether some transaction may hold more jobs than it has locks for. The check of another start can also be
-- the reason; then one more probe is made.
create or replace function tallybook._crowd() returns boolean
language plpgsql as $$
begin
  return not (pg_try_advisory_lock(1413565446, 0) and pg_advisory_unlock(1413565446, 0));
end $$;

-- _locks_left(setting, most): count one more lock of a kind of which the caller's transaction may take many. False if
-- it has reached the limit.
--
-- The count is a setting of the transaction, so a rollback to a savepoint takes it back together with the locks.
create or replace function tallybook._locks_left(p_setting text, p_most int) returns boolean
language plpgsql as $$
declare v_n int := coalesce(nullif(current_setting(p_setting, true), '')::int, 0);
begin
  if v_n >= p_most then return false; end if;
  perform set_config(p_setting, (v_n + 1)::text, true);
  return true;
end $$;
