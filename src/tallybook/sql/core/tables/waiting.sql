--> A job that may not run yet because of others: its turn by its order key has not come, or its parents have not
--> ended.
create table tallybook.waiting (
  job_id       bigint primary key,
  waits_since  timestamptz not null,
  enqueued_at  timestamptz not null,
  run_at       timestamptz,
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
  --> It waits for its turn among the keys of its queue: see fair_release. Null: it waits for something else.
  fair_key     text collate "C",
  fair_seq     bigint,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
);
