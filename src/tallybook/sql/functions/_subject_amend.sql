-- _subject_amend(job_id, args, version, run_at, priority, at): change a subject's job that stands in line, as an upsert asks for.
--
-- Reports updated, unchanged, or null: it has started, or went elsewhere; look again. Priority is only raised, and what is
-- pushed to later leaves its line by promote. Who is about to start the job waits for the caller's transaction (see _queued_still).
-- Errors: TB003 where something is to be changed at another isolation level than READ COMMITTED. Writes amendment.
create or replace function tallybook._subject_amend(p_job_id bigint, p_args jsonb, p_version jsonb, p_run_at timestamptz, p_priority int,
  p_at timestamptz, out report text, out old_run_at timestamptz, out new_run_at timestamptz)
language plpgsql as $$
declare
  e tallybook.entry; a tallybook.amendment; v_priority int; v_args boolean; v_run_at boolean; v_locked boolean := false;
begin
  loop
    e := tallybook._newest(p_job_id);
    if e.job_id is null or exists (select from tallybook.outcome o
                                    where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq)
       or exists (select from tallybook.scheduled s where s.job_id = p_job_id) then
      return;
    end if;
    select x.* into a from tallybook.amendment x where x.job_id = p_job_id;
    select least(l.priority, a.priority) into v_priority from tallybook.lane l where l.lane_id = e.lane_id;
    v_args := (coalesce(a.args, e.args), case when a.args is null then e.options -> 'version' else a.version end)
              is distinct from (p_args, p_version);
    old_run_at := coalesce(a.run_at, e.run_at, e.enqueued_at);
    -- What is due runs at once, whatever it was due at.
    new_run_at := case when p_run_at > p_at or a.run_at is not null then coalesce(p_run_at, old_run_at) else old_run_at end;
    v_run_at := new_run_at <> old_run_at;
    if not v_args and not v_run_at and coalesce(p_priority, v_priority) >= v_priority then
      report := 'unchanged';
      return;
    end if;
    exit when v_locked;
    if current_setting('transaction_isolation') <> 'read committed' then
      raise exception 'an upsert of a pending subject needs READ COMMITTED'
        using errcode = 'TB003', hint = 'With an older snapshot nobody knows whether job ' || p_job_id || ' has started since.';
    end if;
    if not tallybook._queued_still(p_job_id) then return; end if;
    v_locked := true;  -- from here on it does not start before our commit: what is seen now holds
  end loop;
  if v_args then
    if not tallybook._amend(p_job_id, 'replace_args', p_args, null, null, true, p_version) then return; end if;
  end if;
  if v_run_at then
    if not tallybook._amend(p_job_id, 'push_run_at', null, null, new_run_at, true) then return; end if;
  end if;
  if p_priority < v_priority then
    if not tallybook._amend(p_job_id, 'raise_priority', null, p_priority, null, true) then return; end if;
  end if;
  report := 'updated';
end $$;
