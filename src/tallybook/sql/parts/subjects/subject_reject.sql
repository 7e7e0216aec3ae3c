-- subject_reject(lease, job_id, attempt, message, ...): end one attempt of a subject as failed, with an error for the
-- log: it is retried, or dead after the last attempt. A plain fail does the same.
--
--   details, ref_id   more for the log: any JSON value, and the caller's own reference; in the view error
--   retry_in, max_attempts   as in fail
-- Returns scheduled (available, without a delay), dead, or refused. Reads claim, entry; writes outcome, and scheduled
-- or dead.
-- rights: worker
create or replace function tallybook.subject_reject(lease uuid, job_id bigint, attempt int, message text,
  details jsonb default null, ref_id text default null, retry_in interval default null, max_attempts int default null,
  at timestamptz default clock_timestamp())
returns text language sql as $$
  select tallybook.fail(lease, job_id, attempt,
    jsonb_strip_nulls(jsonb_build_object('message', coalesce(message, 'rejected'), 'ref_id', ref_id))
      || case when details is null then '{}' else jsonb_build_object('details', details) end, retry_in, max_attempts,
      false, at)
$$;
