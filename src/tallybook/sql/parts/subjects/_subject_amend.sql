-- _subject_amend(job_id, args, version, run_at, priority, at): change a subject's job in line, as an upsert
-- asks for.
--
-- Reports updated, unchanged, or null: it has started, or went elsewhere; look again. Priority is only raised, and what
-- is pushed to later leaves its line by promote. An amendment is written, as for conflicts of unique keys: see _amend.
-- A start of the job waits for the caller's transaction. A job that waits for a permit is changed in place, and stays
-- there until the caller's transaction has ended.
-- Errors: TB003 where something is to be changed at another isolation level than READ COMMITTED.
-- Writes amendment, waiting.
-- profile: nested
create or replace function tallybook._subject_amend(p_job_id bigint, p_args jsonb, p_version jsonb,
  p_run_at timestamptz, p_priority int, p_at timestamptz, out report text, out old_run_at timestamptz,
  out new_run_at timestamptz)
language plpgsql
set enable_nestloop = on  -- also where the caller has it off
as $$
declare
  e record; a tallybook.amendment; v_priority int; v_args boolean; v_run_at boolean; v_locked boolean := false;
  v_waits boolean;
begin
  loop
    select x.* into e from tallybook.waiting x where x.job_id = p_job_id for update;
    v_waits := found; v_locked := v_locked or v_waits;
    if not v_waits then
      select x.* into e from tallybook._newest_entry(p_job_id) x;
      if e.job_id is null or exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
         or exists (select from tallybook.scheduled s where s.job_id = p_job_id) then
        return;
      end if;
    end if;
    select x.* into a from tallybook.amendment x where x.job_id = p_job_id;
    select least(l.priority, a.priority) into v_priority from tallybook.lane l where l.lane_id = e.lane_id;
    v_args := (coalesce(a.args, e.args), case when a.args is null then e.options -> 'version' else a.version end)
              is distinct from (p_args, p_version);
    old_run_at := coalesce(a.run_at, e.run_at, e.enqueued_at);
    -- What is due runs at once, whatever it was due at.
    new_run_at := case when p_run_at > p_at or a.run_at is not null then coalesce(p_run_at, old_run_at)
      else old_run_at end;
    v_run_at := new_run_at <> old_run_at;
    if not v_args and not v_run_at and coalesce(p_priority, v_priority) >= v_priority then
      report := 'unchanged';
      return;
    end if;
    exit when v_locked;
    perform tallybook._read_committed('an upsert of a pending subject needs READ COMMITTED',
      format('An older snapshot does not show whether job %s has started since.', p_job_id));
    if not tallybook._subject_waits(p_job_id, e.task, p_at) then return; end if;
    v_locked := true;  -- from here on it does not start before our commit: what is seen now holds
  end loop;
  report := 'updated';
  if v_waits then
    perform tallybook._amend_aside(p_job_id, case when v_args then p_args end, p_priority,
                                   case when v_run_at then new_run_at end, p_version, p_at);
    return;
  end if;
  insert into tallybook.amendment as x (job_id, args, version, run_at, priority)
  values (p_job_id, case when v_args then p_args end, case when v_args then p_version end,
          case when v_run_at then new_run_at end, case when p_priority < v_priority then p_priority end)
  on conflict on constraint amendment_pkey do update
    set args = coalesce(excluded.args, x.args), version = case when excluded.args is null then x.version
        else excluded.version end,
        priority = least(excluded.priority, x.priority), run_at = coalesce(excluded.run_at, x.run_at),
        xid = excluded.xid;
  if v_run_at or p_priority < v_priority then perform tallybook._wake(' promote'); end if;
end $$;

-- _subject_waits(job_id, task, at): whether a subject's job is planned or in line, and will not start before the
-- caller's transaction has ended.
--
-- See _start_waits: the lock comes before the look that counts, which reads the newest attempt alone, however many
-- there were.
create or replace function tallybook._subject_waits(p_job_id bigint, p_task text, p_at timestamptz) returns boolean
language plpgsql as $$
begin
  perform tallybook._start_waits(p_job_id, p_task);
  return coalesce((select n.state in ('planned', 'pending') from tallybook._subject_now(p_job_id, p_at) n), false);
end $$;

-- _subject_absorb(job_id): give a planned job the changes that it received while it moved from its line to
-- scheduled: a worker that stopped or died held it, and a producer's transaction was open.
create or replace function tallybook._subject_absorb(p_job_id bigint) returns void
language plpgsql as $$
declare a tallybook.amendment;
begin
  perform from tallybook.scheduled x where x.job_id = p_job_id for update;
  if not found then return; end if;
  delete from tallybook.amendment x where x.job_id = p_job_id returning x.* into a;
  update tallybook.scheduled s
     set args = coalesce(a.args, s.args), run_at = coalesce(a.run_at, s.run_at),
         options = case when a.args is null then s.options else tallybook._versioned(s.options, a.version) end,
         lane_id = coalesce((select n.lane_id
                               from tallybook.lane l, lateral tallybook._lane(l.queue, a.priority, l.part) n
                              where l.lane_id = s.lane_id and a.priority < l.priority), s.lane_id)
   where s.job_id = p_job_id and a.job_id is not null;
end $$;
