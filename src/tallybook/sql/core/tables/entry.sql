-- LEDGER. Columns from wide to narrow: nothing is lost to padding.
--> LEDGER: one row is one attempt that may run now. Its line is its lane, in the order (xid, seq).
create table tallybook.entry (
  --> The transaction that wrote the entry: the cursor moves from snapshot to snapshot over it.
  xid          xid8 not null default pg_current_xact_id(),
  --> Order within one transaction; the job's own id at first, a fresh number when it is put back.
  seq          bigint not null,
  job_id       bigint not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  --> How many failures end the job; null: the limit of its task or its queue, or 5.
  max_attempts smallint,
  retention    "char" not null,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  run_at       timestamptz,
  --> What the earlier attempts failed with, oldest first; null on the way of a job that never failed.
  errors       jsonb,
  --> No attempt starts after this instant: the job is dead then, with the reason expired.
  expires_at   timestamptz,
  --> Of all jobs with this key one runs at a time, in the order in which they came.
  order_key    text,
  --> Rarely used settings of this one job: its retry policy, the version of its args.
  options      jsonb,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
) partition by list (retention);
-- Full pages: these grow at their end only.
create index entry_line on tallybook.entry (lane_id, xid, seq) with (fillfactor = 100);
create index entry_job on tallybook.entry (job_id) with (fillfactor = 100);
-- A job that lives on has thousands of attempts: the newest is found without reading the others. Jobs that succeed at
-- their first attempt are not in it.
create index entry_again on tallybook.entry (job_id, attempt) where attempt > 1;
alter table tallybook.entry replica identity full;
