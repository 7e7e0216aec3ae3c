-- cancel(job_id, reason, at): say that a job shall not run. Returns what that means for it:
--
--   cancelled   no worker had taken it: it will not start
--   cancelling  it runs: its worker is told, stops the handler and ends the attempt as cancelled, unless it completes first
--   completed, cancelled, dead    it had ended already, nothing was done (dead letters are dropped, not cancelled)
-- Only an intent is written, in the caller's transaction; no lock is taken that a claim could wait for, so a transaction
-- that cancelled one job and stays open holds up nobody. If it rolls back, nothing has happened.
-- Errors: TB002 no such job. Reads entry, claim, outcome, scheduled, waiting, dead; writes tombstone.
create or replace function tallybook.cancel(job_id bigint, reason text default null, at timestamptz default clock_timestamp()) returns text
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_attempt int; v_state text; v_ended text; e record;
  v_sure boolean := current_setting('transaction_isolation') = 'read committed';
begin
  for turn in 1..100 loop
    select s.attempt into v_attempt from tallybook.scheduled s where s.job_id = cancel.job_id;
    if not found then select w.attempt into v_attempt from tallybook.waiting w where w.job_id = cancel.job_id; end if;
    if found then
      v_state := 'cancelled';
    else
      select x.lane_id, x.retention, x.xid, x.seq, x.attempt, o.state into e
        from tallybook.entry x
        left join tallybook.outcome o on o.retention = x.retention and o.entry_xid = x.xid and o.entry_seq = x.seq
       where x.job_id = cancel.job_id order by x.attempt desc limit 1;
      if not found then
        if exists (select from tallybook.dead d where d.job_id = cancel.job_id) then return 'dead'; end if;
        raise exception 'there is no job %', cancel.job_id using errcode = 'TB002', detail = coalesce(tallybook._past(cancel.job_id), '');
      end if;
      if e.state in ('completed', 'cancelled', 'dead') then return e.state; end if;
      if e.state is not null then
        -- lost for the last time: its outcome is lost, and it lies with the dead.
        if exists (select from tallybook.dead d where d.job_id = cancel.job_id) then return 'dead'; end if;
        continue;  -- on its way to scheduled, or back, between the two looks
      end if;
      v_attempt := e.attempt;
      v_state := case when tallybook._taken(e.lane_id, e.retention, e.xid, e.seq)
                        or exists (select from tallybook.tombstone t where t.job_id = cancel.job_id and t.attempt = e.attempt and t.taken)
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
      select o.state into v_ended from tallybook.outcome o
       where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq;
      if v_ended in ('completed', 'cancelled', 'dead') then
        -- The intent goes; what keeps the entry out of the line stays.
        delete from tallybook.tombstone t where t.job_id = cancel.job_id and t.attempt = v_attempt and not t.taken;
        update tallybook.tombstone t set cancelled = false where t.job_id = cancel.job_id and t.attempt = v_attempt;
        return v_ended;
      end if;
      -- Failed, snoozed, moved or lost meanwhile: the intent holds for every later attempt.
    end if;
    -- It may have held the line of its order key.
    if v_state = 'cancelled' and exists (select from tallybook.waiting w where w.order_key is not null) then perform tallybook._wake(' promote'); end if;
    if v_state = 'cancelled' then perform tallybook._parent_ended(cancel.job_id); end if;
    if v_state = 'cancelled' and not v_sure then v_state := 'cancelling'; end if;
    perform pg_notify('tallybook', ' cancel')
      where v_state = 'cancelling' and coalesce(current_setting('tallybook.notify', true), 'on') <> 'off';
    return v_state;
  end loop;
  raise exception 'job % cannot be followed: its history has a hole', cancel.job_id using errcode = 'TB002';
end $$;
