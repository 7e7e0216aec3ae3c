-- retry(job_id): give a dead or cancelled job another attempt. Only users call it. Returns the number of that attempt.
--
-- Failures and crashes start again at 0, and expires_at is removed; the error history stays. If a job was cancelled but
-- is still scheduled or waiting, only the cancel is undone: it keeps its state, its failures and its expires_at. A job
-- that had a unique key takes the key again, and a job of a subject takes the subject's name again.
-- Errors: TB002 no such job; TB005 the job is not dead or cancelled, or another live job has its unique key or subject;
-- TB003. Waits for a session that retries, cancels or drops the same job. Reads entry, outcome, claim; deletes from
-- dead; writes tombstone, unique_key, subject_job, order_line, amendment, and entry, waiting (with a fair key).
-- profile: nested
-- rights: operator
create or replace function tallybook.retry(job_id bigint, at timestamptz default clock_timestamp()) returns int
language plpgsql as $$
declare e tallybook.entry; d tallybook.dead; v_state text; v_holder bigint; v_back boolean := false; v_attempt int;
begin
  perform tallybook._read_committed('retry needs READ COMMITTED');
  delete from tallybook.dead x where x.job_id = retry.job_id returning x.* into d;
  if found then
    e := tallybook._entry_of(to_jsonb(d));
  else
    loop  -- Two people at once: the newest attempt's row is locked, as that of a dead letter is.
      v_attempt := e.attempt;
      select x.* into e from tallybook.entry x where x.job_id = retry.job_id order by x.attempt desc limit 1 for update;
      if e.attempt is not distinct from v_attempt
         and (e.job_id is not null or tallybook._behind(retry.job_id) is not null) then
        v_state := tallybook._uncancelled(retry.job_id, e, retry.at);
        exit when v_state in ('cancelled', 'back') or not exists (  -- promote has moved it meanwhile
          select from tallybook.entry x where x.job_id = retry.job_id and x.attempt > coalesce(e.attempt, 0));
      elsif e.job_id is null then
        perform tallybook._check_job(retry.job_id);
      end if;
    end loop;
    v_back := coalesce(v_state = 'back', false);
    if not v_back and (v_state is distinct from 'cancelled' or tallybook._behind(retry.job_id) is not null) then
      raise exception 'job % is not dead or cancelled', retry.job_id
        using errcode = 'TB005', detail = case when v_state = 'completed' then 'It is completed.' when v_state = 'dead'
          and tallybook._behind(retry.job_id) is null then 'Its dead letter was dropped.' else 'It has not ended.' end;
    end if;
  end if;
  if v_back then
    select a.task, a.unique_key, a.job_id, case a.place when 'waiting' then a.order_key end, a.options
      into e.task, e.unique_key, e.job_id, e.order_key, e.options
      from tallybook._aside a where a.job_id = retry.job_id and a.place <> 'dead';
  end if;
  if e.options ? 'subject' then
    perform tallybook._subject_retaken(e, retry.at);
  elsif e.unique_key is not null then
    v_holder := tallybook._claim_key(e.task, e.unique_key, e.job_id);
    if v_holder <> e.job_id then
      raise exception 'job % has the unique key % now', v_holder, to_json(e.unique_key)
        using errcode = 'TB005', hint = 'Cancel that job first, or leave this one.';
    end if;
  end if;
  -- The intents go; what keeps an earlier attempt out of the line stays until the cursor has come by.
  delete from tallybook.tombstone t where t.job_id = retry.job_id and not t.taken and not t.once;
  update tallybook.tombstone t set cancelled = false where t.job_id = retry.job_id and t.cancelled and not t.once;
  -- A new place: a session that saw it dead or cancelled may be deleting the old one at this moment.
  if e.order_key is not null then perform tallybook._line_up(e.order_key, e.job_id); end if;
  if v_back then return tallybook._behind(retry.job_id); end if;
  e := tallybook._amended(e, retry.at);
  e.expires_at := null;  -- a person wants it run now
  e.failures := 0; e.crashes := 0;
  perform tallybook._next_attempt(e, retry.at, retry.at, true);
  return e.attempt + 1;
end $$;

-- _uncancelled(job_id, entry, at): what retry finds for a job that is no dead letter; entry: its newest attempt.
--
-- Returns the state of that attempt, or null if it has none. cancelled: it has ended or will end so, and the job gets
-- another attempt. back: it was cancelled while scheduled or waiting, and continues there.
-- In scheduled the intent is deleted; in a lane it stays with its attempt, which the next claim ends. No lane is
-- locked, because this transaction may stay open.
create or replace function tallybook._uncancelled(p_job_id bigint, e tallybook.entry, p_at timestamptz) returns text
language plpgsql as $$
declare v_state text;
begin
  select o.state into v_state from tallybook._outcome_of(e.retention, e.xid, e.seq) o;
  if v_state = 'cancelled' then return v_state; end if;
  perform from tallybook.scheduled s where s.job_id = p_job_id for update;
  perform from tallybook.waiting s where s.job_id = p_job_id for update;
  if tallybook._behind(p_job_id) is not null
     and exists (select from tallybook.tombstone t where t.job_id = p_job_id and t.cancelled and not t.once) then
    return 'back';
  end if;
  if v_state is not null or e.job_id is null then return v_state; end if;
  update tallybook.tombstone t set once = true
   where t.job_id = e.job_id and t.attempt <= e.attempt and t.cancelled and not t.once
     and not tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
     and not exists (select from tallybook.tombstone k where k.job_id = e.job_id and k.attempt = e.attempt
                     and k.taken);
  if found then
    insert into tallybook.tombstone (job_id, attempt, cancelled, once, created_at)
      values (e.job_id, e.attempt, true, true, p_at)
    on conflict on constraint tombstone_pkey do nothing;  -- the cancel was said to an earlier attempt
    return 'cancelled';
  end if;
  -- a claim has met it while we waited, perhaps
  select o.state into v_state from tallybook._outcome_of(e.retention, e.xid, e.seq) o;
  return v_state;
end $$;

-- _behind(job_id): the next attempt of a job that is scheduled or waiting; null: it is neither.
-- profile: lookup
create or replace function tallybook._behind(p_job_id bigint) returns int language plpgsql stable as $$
begin
  return (select a.attempt from tallybook._aside a where a.job_id = p_job_id and a.place <> 'dead');
end $$;
