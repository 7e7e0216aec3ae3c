-- drop_jobs(jobs): delete these dead letters. Returns the result per job, lowest id first.
--
--   done    dropped; refused: it is not dead; unknown: there is no such job
--   detail  the reason, if refused or unknown
-- Errors: TB005 more than 1000 jobs, or a null among them. Deletes from dead.
-- rights: operator
create or replace function tallybook.drop_jobs(jobs bigint[]) returns table (job_id bigint, done text, detail text)
language plpgsql as $$
begin
  for job_id in select i from tallybook._these_jobs(drop_jobs.jobs) i loop
    if tallybook.drop_dead(job_id) then
      done := 'dropped'; detail := null;
    else
      detail := (select format('job %s is %s', job_id, j.state) from tallybook.job j where j.id = job_id);
      done := case when detail is null then 'unknown' else 'refused' end;
      detail := coalesce(detail, format('there is no job %s', job_id));
    end if;
    return next;
  end loop;
end $$;
