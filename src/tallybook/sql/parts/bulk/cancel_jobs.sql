-- cancel_jobs(jobs, reason, at): say of each of these jobs that it shall not run, as cancel does. Says per job what
-- became of it, the lowest id first.
--
--   done    cancelled: it will not start; cancelling: it runs and its worker is told; refused: it had ended; unknown:
--           there is no such job
--   detail  why not
-- Errors: TB005 more than 1000 jobs.
-- rights: operator
create or replace function tallybook.cancel_jobs(jobs bigint[], reason text default null,
  at timestamptz default clock_timestamp())
returns table (job_id bigint, done text, detail text) language plpgsql as $$
declare
  v_detail text;
begin
  for job_id in select i from tallybook._these_jobs(cancel_jobs.jobs) i loop
    begin
      done := tallybook.cancel(job_id, reason, at);
      detail := null;
      if done not in ('cancelled', 'cancelling') then
        detail := format('job %s is %s already', job_id, done);
        done := 'refused';
      end if;
    exception when sqlstate 'TB002' then
      get stacked diagnostics detail = message_text, v_detail = pg_exception_detail;
      done := 'unknown';
      detail := concat_ws('. ', detail, nullif(rtrim(v_detail, '.'), ''));
    end;
    return next;
  end loop;
end $$;
