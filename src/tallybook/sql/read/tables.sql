-- One row of a list of jobs: what jobs() and its sources hand to each other. last: the last entry of its error history.
create type tallybook.job_line as (
  id bigint, queue text, task text, state text, priority int, attempt int, attempts int, failures int, max_attempts int,
  enqueued_at timestamptz, run_at timestamptz, started_at timestamptz, ended_at timestamptz, worker text, summary text,
  reason text, last_error text, subject text, unique_key text, progress float4, unserved boolean, last jsonb
);

-- What has failed among what has not: few of many.
create index scheduled_failed on tallybook.scheduled (job_id) where errors is not null;
create index waiting_failed on tallybook.waiting (job_id) where errors is not null;

-- The jobs of a row of yours, by headers.links, which few jobs have: the others are in none of these and cost
-- nothing. GIN, since a job may have several; without a list of pending rows, which every look-up would read and now
-- and then a producer would have to sort in.
do $$
declare
  v_table text;
begin
  foreach v_table in array array['entry', 'scheduled', 'waiting', 'dead'] loop
    execute format('create index %I on tallybook.%I using gin ((headers -> ''links'') jsonb_path_ops)'
      ' with (fastupdate = off) where headers ? ''links''', v_table || '_linked', v_table);
  end loop;
end $$;
