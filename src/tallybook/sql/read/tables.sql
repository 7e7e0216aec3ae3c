-- One row of a list of jobs, as jobs() and its sources pass it on. last: the last entry of its error history.
create type tallybook.job_line as (
  id bigint, queue text, task text, state text, priority int, attempt int, attempts int, failures int, max_attempts int,
  enqueued_at timestamptz, run_at timestamptz, started_at timestamptz, ended_at timestamptz, worker text, summary text,
  reason text, last_error text, subject text, unique_key text, progress float4, unserved boolean, last jsonb
);

-- One reason found by a part of why. A part returns them in the order in which they have to be solved.
create type tallybook._reason as (reason text, explanation text, details jsonb);

-- The answer of one check of the doctor: see doctor.
create type tallybook._check as (name text, level text, finding text, advice text, details jsonb);

-- The row in which a job is now: see _job_place.
create type tallybook._job_place as (
  place text, job_id bigint, lane_id int, queue text, priority int, part text, retired boolean, retention "char",
  xid xid8, seq bigint, attempt int, failures int, task text, args jsonb, unique_key text, order_key text,
  fair_key text, fair_seq bigint, expires_at timestamptz, options jsonb, run_at timestamptz, enqueued_at timestamptz,
  since timestamptz, state text, error jsonb, reason text
);

-- The few failures among many rows.
create index scheduled_failed on tallybook.scheduled (job_id) where errors is not null;
create index waiting_failed on tallybook.waiting (job_id) where errors is not null;

-- The jobs with headers.links, usually few; other jobs are in none of these indexes and cost
-- nothing. GIN, because a job can have several links; no fastupdate, because each look-up would read the pending list
-- and now and then a producer would have to merge it.
do $$
declare v_table text;
begin
  foreach v_table in array array['entry', 'scheduled', 'waiting', 'dead'] loop
    execute format('create index %I on tallybook.%I using gin ((headers -> ''links'') jsonb_path_ops)'
      ' with (fastupdate = off) where headers ? ''links''', v_table || '_linked', v_table);
  end loop;
end $$;
