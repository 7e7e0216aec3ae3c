-- _start_waits(job_id, task): a queued job that somebody claims from now on does not start before the caller's
-- transaction has ended.
--
-- The caller looks at the job after this call: either it sees the claim, or the start sees the lock (see
-- _amendment_state) and waits. All locks here are shared and held to the commit; a start only tries them. So producers
-- never wait, and cannot deadlock.
-- One lock for each of the first 128 jobs (class 1413565447). A server has room for a few thousand locks only, so a
-- transaction that changes more jobs takes one of 64 locks for the task instead (class 1413565446): until it has ended,
-- no queued job of this task that has a unique key or a subject starts. Lock 0 of that class tells starts that such a
-- transaction exists.
create or replace function tallybook._start_waits(p_job_id bigint, p_task text) returns void
language plpgsql as $$
begin
  if tallybook._locks_left('tallybook.jobs_locked', 128) then
    perform pg_advisory_xact_lock_shared(1413565447, hashint8(p_job_id));
  else
    perform pg_advisory_xact_lock_shared(1413565446, 0);
    perform pg_advisory_xact_lock_shared(1413565446, 1 + (hashtext(p_task) & 63));
  end if;
end $$;

-- _crowd(): whether some transaction may hold more jobs than it has locks for. Another start's look can be the reason,
-- too: then one more probe is made.
create or replace function tallybook._crowd() returns boolean
language plpgsql as $$
begin
  return not (pg_try_advisory_lock(1413565446, 0) and pg_advisory_unlock(1413565446, 0));
end $$;

-- _locks_left(setting, most): count one more lock of a kind that the caller's transaction takes many of. False: it has
-- that many.
--
-- The count is a setting of the transaction: a rollback to a savepoint takes it back together with the locks.
create or replace function tallybook._locks_left(p_setting text, p_most int) returns boolean
language plpgsql as $$
declare
  v_n int := coalesce(nullif(current_setting(p_setting, true), '')::int, 0);
begin
  if v_n >= p_most then return false; end if;
  perform set_config(p_setting, (v_n + 1)::text, true);
  return true;
end $$;
