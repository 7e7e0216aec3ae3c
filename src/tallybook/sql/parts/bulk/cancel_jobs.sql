-- cancel_jobs(jobs, reason, at): cancel each of these jobs, as cancel does. Returns the result per job, lowest id
-- first.
--
--   done    cancelled: the job will not start; cancelling: it is running, and its worker stops it; refused: it had
--           already ended; unknown: there is no such job
--   detail  the reason, if refused or unknown
-- Errors: TB005 more than 1000 jobs.
-- rights: operator
create or replace function tallybook.cancel_jobs(jobs bigint[], reason text default null,
  at timestamptz default clock_timestamp())
returns table (job_id bigint, done text, detail text) language sql as $$
  select i, r.* from tallybook._these_jobs(cancel_jobs.jobs) i
   cross join lateral tallybook._retry_or_cancel('cancel', i, cancel_jobs.reason, cancel_jobs.at) r
$$;
