-- cancel(job_id, reason, at): cancel a job. Returns the effect:
--
--   cancelled   the job had not been claimed and will not start. If a worker claims it before this transaction commits,
--               the worker stops it, as for cancelling. Also returned if it had already ended as cancelled
--   cancelling  the job is running: its worker stops the handler and ends the attempt as cancelled, unless it completes
--               first. At isolation levels other than READ COMMITTED, also returned if the job has not been claimed
--   completed, dead    the job had already ended, so nothing was done. dead: its dead letter had been dropped, or it
--               died during this call
-- A dead letter ends as cancelled at once: it keeps its errors and is no longer a dead letter (see _cancel_dead). For
-- every other job, this only records a request in the caller's transaction, without a lock that a claim could wait for.
-- A transaction that stays open after it delays no other session, and a rollback undoes it.
-- Errors: TB002 no such job. Reads entry, claim, outcome, scheduled, waiting, dead; writes tombstone; for a dead letter
-- entry, outcome, tally, subject_job; deletes from dead.
-- profile: nested
-- rights: operator
create or replace function tallybook.cancel(job_id bigint, reason text default null,
  at timestamptz default clock_timestamp()) returns text language plpgsql as $$
declare
  v_attempt int; v_last int; v_state text; v_ended text; e record;
  v_sure boolean := current_setting('transaction_isolation') = 'read committed';
begin
  for turn in 1..100 loop
    select a.attempt into v_attempt from tallybook._aside a where a.job_id = cancel.job_id and a.place <> 'dead';
    if found then
      v_state := 'cancelled';
    else
      select x.lane_id, x.retention, x.xid, x.seq, x.attempt, o.state into e
        from tallybook.entry x
        left join tallybook.outcome o on o.retention = x.retention and o.entry_xid = x.xid and o.entry_seq = x.seq
       where x.job_id = cancel.job_id order by x.attempt desc limit 1;
      if not found then
        if tallybook._cancel_dead(cancel.job_id, cancel.reason, cancel.at) then return 'cancelled'; end if;
        perform tallybook._check_job(cancel.job_id);
        continue;  -- it moved between the tables
      end if;
      if e.state in ('completed', 'cancelled') then return e.state; end if;
      if e.state is not null then
        -- Dead, or lost for the last time: its outcome is lost, and it lies with the dead.
        if tallybook._cancel_dead(cancel.job_id, cancel.reason, cancel.at) then return 'cancelled'; end if;
        -- Twice the same: nothing has come after it.
        if e.state in ('dead', 'lost') and e.attempt = v_last then return 'dead'; end if;
        v_last := e.attempt;
        continue;  -- retried, or moved to scheduled or back, between the two looks
      end if;
      v_attempt := e.attempt;
      v_state := case when tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
                        or exists (select from tallybook.tombstone t where t.job_id = cancel.job_id
                                   and t.attempt = e.attempt and t.taken)
                      then 'cancelling' else 'cancelled' end;
    end if;
    insert into tallybook.tombstone as t (job_id, attempt, cancelled, reason, created_at)
    values (cancel.job_id, v_attempt, true, cancel.reason, cancel.at)
    on conflict on constraint tombstone_pkey do nothing;
    if not found then  -- cancelled before, or taken by its id, perhaps while we waited for that claim
      update tallybook.tombstone t set cancelled = true, reason = cancel.reason, xid = pg_current_xact_id()
       where t.job_id = cancel.job_id and t.attempt = v_attempt and not t.cancelled;
      if found and v_state = 'cancelled' then continue; end if;
      -- The cursor came by, and the tombstone that was there has gone: look again.
      continue when not found and not exists (
        select from tallybook.tombstone t where t.job_id = cancel.job_id and t.attempt = v_attempt and t.cancelled);
    end if;
    if v_state = 'cancelling' then
      select o.state into v_ended from tallybook._outcome_of(e.retention, e.xid, e.seq) o;
      if v_ended in ('completed', 'cancelled', 'dead') then
        -- The intent goes; what keeps the entry out of the line stays.
        delete from tallybook.tombstone t where t.job_id = cancel.job_id and t.attempt = v_attempt and not t.taken;
        update tallybook.tombstone t set cancelled = false where t.job_id = cancel.job_id and t.attempt = v_attempt;
        return v_ended;
      end if;
      -- Failed, snoozed, moved or lost meanwhile: the intent holds for every later attempt.
    end if;
    -- It may have held the line of its order key.
    if v_state = 'cancelled' and exists (select from tallybook.waiting w where w.order_key is not null)
       then perform tallybook._wake(' promote'); end if;
    if v_state = 'cancelled' then perform tallybook._parent_ended(cancel.job_id); end if;
    if v_state = 'cancelled' and not v_sure then v_state := 'cancelling'; end if;
    perform pg_notify('tallybook', ' cancel')
      where v_state = 'cancelling' and coalesce(current_setting('tallybook.notify', true), 'on') <> 'off';
    return v_state;
  end loop;
  raise exception 'job % cannot be followed: its history has a hole', cancel.job_id using errcode = 'TB002';
end $$;

-- _cancel_dead(job_id, reason, at): end a dead letter as cancelled. Returns false if there is none.
--
-- It gets one more entry that has already ended, as in _cancel_aside, and a tombstone takes the cursor past it.
-- Failures and errors are kept, and a subject's name is free, as after every cancel. A retry finds a job that was
-- cancelled before its start.
-- Waits for a session that retries, drops or cancels the same dead letter.
-- profile: lookup
create or replace function tallybook._cancel_dead(p_job_id bigint, p_reason text, p_at timestamptz) returns boolean
language plpgsql as $$
declare d tallybook.dead; e tallybook.entry;
begin
  delete from tallybook.dead x where x.job_id = p_job_id returning x.* into d;
  if not found then return false; end if;
  e := tallybook._entry_of(to_jsonb(d));
  e.attempt := e.attempt + 1;
  insert into tallybook.tombstone (job_id, attempt, taken, created_at) values (e.job_id, e.attempt, true, p_at);
  insert into tallybook.entry values (e.*);
  insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
  values (e.xid, e.seq, e.job_id, p_at, e.retention, 'cancelled',
          case when p_reason is not null then jsonb_build_object('message', p_reason) end);
  perform tallybook._tally(array[e.lane_id], array[e.task], array['cancelled'], array[1], array[e.attempt]);
  if d.options ? 'subject' then perform tallybook._subject_lives(d.task, d.unique_key, d.job_id); end if;
  return true;
end $$;
