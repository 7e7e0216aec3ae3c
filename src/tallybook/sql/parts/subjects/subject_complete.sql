-- subject_complete(lease, job_id, attempt, args, version): end one attempt of a subject, and with it the subject, for
-- good. Its name stays taken, so a later push is a no-op; a later upsert revives it. A plain complete of its job does
-- the same.
--
--   args     the args to keep; null: those of this attempt
--   version  their version; null: that of the job
-- Returns completed, or refused (the attempt no longer belongs to the caller; nothing has changed).
-- Errors: TB005 not a subject's job. Reads claim, entry; writes outcome, subject_job.
-- rights: worker
create or replace function tallybook.subject_complete(lease uuid, job_id bigint, attempt int, args jsonb default null,
  at timestamptz default clock_timestamp(), version int default null)
returns text language plpgsql as $$
declare e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'completed', null, args, at, version);
begin
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._subject_ended(e, 'completed', at, 0, null);
  return 'completed';
end $$;
