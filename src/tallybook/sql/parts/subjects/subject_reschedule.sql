-- subject_reschedule(lease, job_id, attempt, run_at | run_in, args, version): end one attempt of a subject: this
-- iteration is done, and the next one comes at run_at, or run_in after now ('1 week', '1 month').
--
-- Failures and crashes start again at 0 with an empty error history; iterations grows by one; last_at is now. The
-- checkpoint is deleted. With a past time, the job is available at once.
--   args     the args of the next iteration; null: those of this one
--   version  their version; null: that of the job
-- Returns scheduled, available, or refused (the attempt no longer belongs to the caller; nothing has changed).
-- Errors: TB005 neither or both of the times, or not a subject's job. Reads claim, entry; writes outcome, and scheduled
-- or entry.
-- rights: worker
create or replace function tallybook.subject_reschedule(lease uuid, job_id bigint, attempt int,
  run_at timestamptz default null, run_in interval default null, args jsonb default null,
  at timestamptz default clock_timestamp(), version int default null)
returns text language plpgsql as $$
declare e tallybook.entry; v_run_at timestamptz := coalesce(run_at, at + run_in);
begin
  if v_run_at is null or run_at is not null and run_in is not null or not isfinite(v_run_at) then
    perform tallybook._refuse(true, 'subject_reschedule needs run_at or run_in', 'Pass exactly one of them.');
  end if;
  e := tallybook._subject_end(lease, job_id, attempt, 'snoozed', null, args, at, version);
  if e.job_id is null then return 'refused'; end if;
  if e.options ? 'turn' then  -- no longer before its queue's backlog: only this iteration has waited
    e.lane_id := coalesce((select tallybook._lane_beside(l.lane_id, '') from tallybook.lane l
                            where l.lane_id = e.lane_id and l.part = 'turn'), e.lane_id);
  end if;
  e.options := jsonb_set(e.options - 'turn' - 'permits', '{subject,from}', to_jsonb(e.attempt));
  delete from tallybook.progress p where p.job_id = e.job_id;
  e.failures := 0; e.crashes := 0; e.errors := null;
  perform tallybook._next_attempt(e, v_run_at, at);
  return case when v_run_at > at then 'scheduled' else 'available' end;
end $$;
