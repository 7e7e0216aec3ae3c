-- retry_jobs(jobs, at): give each of these jobs another attempt, at once, as retry does. Says per job what became of
-- it, the lowest id first.
--
--   done    retried; refused: it is not dead or cancelled any more, or another live job has its unique key; unknown:
--           there is no such job
--   detail  the number of the attempt, or why not
-- What is refused does not keep the others from it. One that somebody else retries at the same moment is waited for, in
-- the order of ids, so that nobody waits for somebody who waits. Errors: TB005 more than 1000 jobs; TB003.
-- rights: operator
create or replace function tallybook.retry_jobs(jobs bigint[], at timestamptz default clock_timestamp())
returns table (job_id bigint, done text, detail text) language sql as $$
  select i, r.* from tallybook._these_jobs(retry_jobs.jobs) i
   cross join lateral tallybook._retry_or_cancel('retry', i, null, retry_jobs.at) r
$$;

-- _retry_or_cancel(verb, job_id, reason, at): does that to one job; what became of it, as retry_jobs and cancel_jobs
-- report it.
create or replace function tallybook._retry_or_cancel(p_verb text, p_job_id bigint, p_reason text default null,
  p_at timestamptz default clock_timestamp(), out done text, out detail text)
language plpgsql as $$
declare
  v_detail text;
begin
  if p_verb = 'retry' then
    done := 'retried';
    detail := format('attempt %s', tallybook.retry(p_job_id, p_at));
    return;
  end if;
  done := tallybook.cancel(p_job_id, p_reason, p_at);
  if done not in ('cancelled', 'cancelling') then
    detail := format('job %s is %s already', p_job_id, done);
    done := 'refused';
  end if;
exception when sqlstate 'TB005' or sqlstate 'TB002' then
  get stacked diagnostics detail = message_text, v_detail = pg_exception_detail;
  done := case sqlstate when 'TB002' then 'unknown' else 'refused' end;
  detail := concat_ws('. ', detail, nullif(rtrim(v_detail, '.'), ''));
end $$;

-- _these_jobs(jobs): each id once, the lowest first. Raises TB005 for more than 1000, and for null.
create or replace function tallybook._these_jobs(p_jobs bigint[]) returns setof bigint language plpgsql immutable as $$
begin
  perform tallybook._refuse(p_jobs is null or cardinality(p_jobs) > 1000 or array_position(p_jobs, null) is not null,
                            'jobs are up to 1000 ids', 'Say more of them in several calls.');
  return query select distinct i from unnest(p_jobs) i order by i;
end $$;
