-- subject_complete(lease, job_id, attempt, args, version): end one attempt of a subject for good. Its name is kept, so
-- that a later push is a no-op; a later upsert revives it. A plain complete of a subject's job means the same.
--
--   args     what is kept of it; null: what it worked on
--   version  of the task's args that they are; null: the one that the job says
-- Returns completed, or refused (the right to end this attempt was lost; nothing has happened).
-- Errors: TB005 no subject's job. Reads claim, entry; writes outcome, subject_job.
-- rights: worker
create or replace function tallybook.subject_complete(lease uuid, job_id bigint, attempt int, args jsonb default null,
  at timestamptz default clock_timestamp(), version int default null)
returns text language plpgsql as $$
declare
  e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'completed', null, args, at, version);
begin
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._subject_ended(e, 'completed', at, 0, null);
  return 'completed';
end $$;
