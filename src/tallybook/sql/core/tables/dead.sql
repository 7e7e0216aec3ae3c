--> A dead letter: a job out of attempts, kept for people, with its error history.
create table tallybook.dead (
  job_id       bigint primary key,
  died_at      timestamptz not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  max_attempts smallint,
  reason       text not null,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  errors       jsonb,
  expires_at   timestamptz,
  order_key    text,
  options      jsonb,
  constraint "a dead letter has a reason" check (reason in ('failed', 'crashed', 'expired', 'killed'))
);
create index dead_newest on tallybook.dead (died_at);
