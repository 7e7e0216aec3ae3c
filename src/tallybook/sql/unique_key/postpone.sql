-- postpone(lease, job_id, attempt): end an attempt whose job was given a later time before it started (see
-- claimed_jobs, push_run_at). Returns scheduled, available (the time has come), or refused.
-- Reads claim, entry, amendment; writes outcome, tally, amendment, and scheduled or entry; see _leave_lines.
-- profile: lookup
-- rights: worker
create or replace function tallybook.postpone(lease uuid, job_id bigint, attempt int,
  at timestamptz default clock_timestamp()) returns text language plpgsql as $$
declare v_run_at timestamptz; e tallybook.entry;
begin
  e := tallybook._end(lease, job_id, attempt, 'moved', null, at);
  if e.job_id is null then return 'refused'; end if;
  select a.run_at into v_run_at from tallybook.amendment a where a.job_id = postpone.job_id;
  perform tallybook._moved_to(e, v_run_at, at);
  return case when v_run_at > at then 'scheduled' else 'available' end;
end $$;
