-- An entry is never updated. Changes of a queued job by a conflict of unique keys are stored here. The claim reads
-- them, and promote moves the job if it was given another lane or time. They become part of the job's next entry,
-- and the row is deleted then.
--> Changed args, priority or run_at of a queued job.
create table tallybook.amendment (
  job_id   bigint primary key,
  args     jsonb,
  priority smallint,
  run_at   timestamptz,
  --> The transaction that changed it last.
  xid      xid8 not null default pg_current_xact_id(),
  --> The version of the changed args; null with args: the first one.
  version  jsonb
);

-- What _amendment_state answers; a type of its own, so that it can be asked for in a CASE, for the few jobs that have a
-- unique key.
create type tallybook.amendment_state as (busy boolean, args jsonb, run_at timestamptz, version jsonb,
                                          cancelled boolean);
