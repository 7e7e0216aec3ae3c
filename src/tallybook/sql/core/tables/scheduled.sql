--> A job that may not run yet: delayed, in backoff after a failure, or snoozed.
create table tallybook.scheduled (
  job_id       bigint primary key,
  run_at       timestamptz not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  max_attempts smallint,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  errors       jsonb,
  expires_at   timestamptz,
  order_key    text,
  options      jsonb,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
);
create index scheduled_due on tallybook.scheduled (run_at);
