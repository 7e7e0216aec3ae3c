-- 0006: seeing and steering: the record of what people have changed, the nonces of signed requests, lists of jobs. Workers may run.

-- Audit and nonces

-- Lists of jobs

-- One row of a list of jobs: what jobs() and its sources hand to each other.
create type tallybook.job_line as (
  id bigint, queue text, task text, state text, priority int, attempts int, failures int, max_attempts int, enqueued_at timestamptz,
  run_at timestamptz, started_at timestamptz, ended_at timestamptz, worker text, summary text, reason text, last_error text, subject text,
  unique_key text, progress float4, unserved boolean
);
