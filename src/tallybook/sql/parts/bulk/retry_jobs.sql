-- retry_jobs(jobs, at): give each of these jobs another attempt at once, as retry does. Returns the result per job,
-- lowest id first.
--
--   done    retried; refused: it is not dead or cancelled, or another live job has its unique key or its subject;
--           unknown: there is no such job
--   detail  the number of the new attempt, or the reason if refused or unknown
-- A refusal does not affect the others. A job that another session retries at the same moment is waited for, in the
-- order of ids, so two of these calls cannot deadlock. Errors: TB005 more than 1000 jobs, or a null among them; TB003.
-- rights: operator
create or replace function tallybook.retry_jobs(jobs bigint[], at timestamptz default clock_timestamp())
returns table (job_id bigint, done text, detail text) language sql as $$
  select i, r.* from tallybook._these_jobs(retry_jobs.jobs) i
   cross join lateral tallybook._retry_or_cancel('retry', i, null, retry_jobs.at) r
$$;

-- _retry_or_cancel(verb, job_id, reason, at): retry or cancel one job; the result as in retry_jobs and
-- cancel_jobs.
create or replace function tallybook._retry_or_cancel(p_verb text, p_job_id bigint, p_reason text default null,
  p_at timestamptz default clock_timestamp(), out done text, out detail text)
language plpgsql as $$
declare v_detail text;
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

-- _these_jobs(jobs): each id once, lowest first. Raises TB005 for more than 1000, and for null.
create or replace function tallybook._these_jobs(p_jobs bigint[]) returns setof bigint language sql stable as $$
  select tallybook._refuse(p_jobs is null or cardinality(p_jobs) > 1000 or array_position(p_jobs, null) is not null,
                           'pass at most 1000 ids', 'Pass more of them in several calls.');
  select distinct i from unnest(p_jobs) i order by i
$$;
