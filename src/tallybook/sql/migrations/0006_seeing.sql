-- 0006: seeing and steering: the record of what people have changed, the nonces of signed requests, lists of jobs. Workers may run.

-- Audit and nonces

-- What people have changed by a page, by the API or in another way that puts it on record: in the transaction of the change itself.
create table tallybook.audit (
  id     bigint generated always as identity primary key,
  at     timestamptz not null,
  actor  text not null,
  via    text not null,
  action text not null,
  target jsonb not null,
  done   jsonb not null,
  constraint "who, how and what are named" check (actor <> '' and via <> '' and action <> ''),
  constraint "target and done are objects" check (jsonb_typeof(target) = 'object' and jsonb_typeof(done) = 'object')
);
create index audit_of_actor on tallybook.audit (actor, id);
create index audit_of_action on tallybook.audit (action, id);
comment on table tallybook.audit is 'What people have changed. Rows are added, never updated, and go after the retention of the class audit.';
comment on column tallybook.audit.target is 'What was meant; never args or secrets.';
comment on column tallybook.audit.done is 'What became of it; never args or secrets.';

-- UNLOGGED would forget them in a crash, and what was captured before it could be sent again.
create table tallybook.api_nonce (
  key_id  text not null,
  nonce   text not null,
  seen_at timestamptz not null,
  primary key (key_id, nonce)
);
create index api_nonce_seen on tallybook.api_nonce (seen_at);
comment on table tallybook.api_nonce is 'Signed requests that were served, for as long as somebody could send them again: see nonce_take.';

insert into tallybook.retention_class (name, keep, what) values
  ('audit', '90 days', 'what people have changed, and who');

-- Workers

-- What a worker says of itself: at its start, and with each heartbeat. Null: it is of a release that does not say so, or has not said yet.
alter table tallybook.worker add column slots int[], add column version text, add column lag interval, add column memory bigint;
comment on column tallybook.worker.slots is 'How many jobs of each of its queues run at once, in the order of queues.';
comment on column tallybook.worker.version is 'Of the package it runs.';
comment on column tallybook.worker.lag is 'The longest that its event loop let a sign wait between its last two heartbeats.';
comment on column tallybook.worker.memory is 'Bytes of its process that were in memory at its last heartbeat.';
drop function if exists tallybook.renew(int, bigint, bigint[], timestamptz);
drop function if exists tallybook.worker_start(text, text[], text[], boolean, timestamptz, interval, jsonb);
-- Of one worker, too.
drop function if exists tallybook.running(int);

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
