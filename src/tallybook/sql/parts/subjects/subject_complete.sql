-- subject_complete(lease, job_id, attempt, args, version): end one attempt of a subject for good. Its name is kept, so that a later push is
-- a no-op; a later upsert revives it. A plain complete of a subject's job means the same.
--
--   args     what is kept of it; null: what it worked on
--   version  of the task's args that they are; null: the one that the job says
-- Returns completed, or refused (the right to end this attempt was lost; nothing has happened).
-- Errors: TB005 no subject's job. Reads claim, entry; writes outcome, subject_job.
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

-- subject_drop(lease, job_id, attempt): end one attempt of a subject for good and forget its name: a later push makes a new one.
-- Returns dropped, or refused. Reads claim, entry; writes outcome; deletes from subject_job.
create or replace function tallybook.subject_drop(lease uuid, job_id bigint, attempt int, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'completed', null, null, at);
begin
  if e.job_id is null then return 'refused'; end if;
  delete from tallybook.subject_job j where j.task = e.task and j.subject = e.unique_key and j.job_id = e.job_id;
  return 'dropped';
end $$;

-- subject_kill(lease, job_id, attempt, reason, args, version): end one attempt of a subject for good: a dead letter with the reason killed. Its
-- name is kept: no push or upsert brings it back, only a person's retry or subject_forget.
-- Returns dead, or refused. Reads claim, entry; writes outcome, dead, subject_job, and what on_dead says.
create or replace function tallybook.subject_kill(lease uuid, job_id bigint, attempt int, reason text default null, args jsonb default null,
  at timestamptz default clock_timestamp(), version int default null)
returns text language plpgsql as $$
declare
  v_error jsonb := jsonb_build_object('attempt', attempt, 'at', at, 'type', 'Killed', 'message', coalesce(reason, 'killed'));
  e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'dead', v_error, args, at, version);
begin
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._bury(e, 'killed', at, e.failures, e.crashes, tallybook._errors(e.errors, v_error));
  return 'dead';
end $$;

-- subject_reject(lease, job_id, attempt, message, ...): end one attempt of a subject as failed, with an error for the log: backoff, or dead when
-- it has failed as often as it may. A plain fail means the same.
--
--   details, ref_id   what else is to be logged: any JSON value, and the caller's own reference; in the view error
--   retry_in, max_attempts   as in fail
-- Returns scheduled (available, without a delay), dead, or refused. Reads claim, entry; writes outcome, and scheduled or dead.
create or replace function tallybook.subject_reject(lease uuid, job_id bigint, attempt int, message text, details jsonb default null,
  ref_id text default null, retry_in interval default null, max_attempts int default null, at timestamptz default clock_timestamp())
returns text language sql as $$
  select tallybook.fail(lease, job_id, attempt,
    jsonb_strip_nulls(jsonb_build_object('message', coalesce(message, 'rejected'), 'ref_id', ref_id))
      || case when details is null then '{}' else jsonb_build_object('details', details) end, retry_in, max_attempts, false, at)
$$;
