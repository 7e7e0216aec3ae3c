-- _bury(entry, reason, at, failures, crashes, errors): keep a job that is out of attempts as a dead letter.
create or replace function tallybook._bury(e tallybook.entry, p_reason text, p_at timestamptz, p_failures int, p_crashes int, p_errors jsonb)
returns void language sql as $$
  insert into tallybook.dead (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, reason, task, args,
                              headers, unique_key, errors)
  values (e.job_id, p_at, e.enqueued_at, e.lane_id, e.attempt, p_failures, p_crashes, e.max_attempts, p_reason, e.task, e.args,
          e.headers, e.unique_key, p_errors)
$$;
