-- 0006: seeing and steering: the record of what people have changed, the nonces of signed requests, lists of jobs. Workers may run.

-- Audit and nonces

-- Lists of jobs

-- One row of a list of jobs: what jobs() and its sources hand to each other. last: the last entry of its error history.
create type tallybook.job_line as (
  id bigint, queue text, task text, state text, priority int, attempt int, attempts int, failures int, max_attempts int, enqueued_at timestamptz,
  run_at timestamptz, started_at timestamptz, ended_at timestamptz, worker text, summary text, reason text, last_error text, subject text,
  unique_key text, progress float4, unserved boolean, last jsonb
);
-- What has failed among what has not: few of many.
create index scheduled_failed on tallybook.scheduled (job_id) where errors is not null;
create index waiting_failed on tallybook.waiting (job_id) where errors is not null;
-- Which subjects have stopped, the last first: written when one stops, not by its iterations.
create index subject_stopped on tallybook.subject_job (ended_at, task, subject) where ended_at is not null;
