-- An entry is never updated. What a conflict of unique keys changes in a job that stands in line is written here;
-- whoever claims it reads it, and promote moves the job where another lane or time was asked for. A job takes it
-- along when it goes back in line, and the row goes then.
create table tallybook.amendment (
  job_id   bigint primary key,
  args     jsonb,
  priority smallint,
  run_at   timestamptz,
  xid      xid8 not null default pg_current_xact_id(),
  version  jsonb
);
comment on column tallybook.amendment.xid is 'The transaction that changed it last.';
comment on table tallybook.amendment is 'Changed args, priority or run_at of a job that stands in line.';
comment on column tallybook.amendment.version is 'The version of the changed args; null with args: the first one.';

-- What _amendment_state answers; a type of its own, so that it can be asked for in a CASE, for the few jobs that have a
-- unique key.
create type tallybook.amendment_state as (busy boolean, args jsonb, run_at timestamptz, version jsonb,
                                          cancelled boolean);
