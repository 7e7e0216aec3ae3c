-- subject_drop(lease, job_id, attempt): end one attempt of a subject for good and free its name: a later push creates a
-- new one.
-- Returns dropped, or refused. Errors: TB005 not a subject's job. Reads claim, entry; writes outcome, tally; deletes
-- from subject_job.
-- rights: worker
create or replace function tallybook.subject_drop(lease uuid, job_id bigint, attempt int,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'completed', null, null, at);
begin
  if e.job_id is null then return 'refused'; end if;
  delete from tallybook.subject_job j where j.task = e.task and j.subject = e.unique_key and j.job_id = e.job_id;
  return 'dropped';
end $$;
