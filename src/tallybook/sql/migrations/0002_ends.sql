-- 0002: every way a job can end: results, expiry, order keys, conflicts of unique keys, progress, the catalogue of tasks.
--
-- New columns are nullable and have no default, so each table is locked for a moment only and nothing is rewritten. A row
-- that does not use them is not a byte longer: they share the byte of null bits that is there.

alter table tallybook.entry add column expires_at timestamptz, add column order_key text, add column options jsonb;
alter table tallybook.scheduled add column expires_at timestamptz, add column order_key text, add column options jsonb;
alter table tallybook.dead add column expires_at timestamptz, add column order_key text, add column options jsonb;
alter table tallybook.outcome add column result jsonb;
create index scheduled_of_order on tallybook.scheduled (order_key) where order_key is not null;
comment on column tallybook.entry.expires_at is 'No attempt starts after this instant: the job is dead then, with the reason expired.';
comment on column tallybook.entry.order_key is 'Of all jobs with this key one runs at a time, in the order in which they came.';
comment on column tallybook.entry.options is 'Rarely used settings of this one job: its retry policy, the version of its args.';
comment on column tallybook.outcome.result is 'What the handler returned, where it returned anything.';

-- What this schema asks of a library: one that expects an older version down to this one may work with it.
alter table tallybook.installation add column works_from int not null default 2;

-- A unique key that only holds while its job is queued can have older jobs that still run.
alter table tallybook.unique_key add column others bigint[];
comment on column tallybook.unique_key.others is 'Older jobs with this key that still ran when this generation was taken.';

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
  order_key    text not null,
  options      jsonb,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
);
create index waiting_of_key on tallybook.waiting (order_key);
comment on table tallybook.waiting is 'A job whose turn by its order key has not come: put back in line when the one before it has ended.';

-- Who is next of an order key: the lowest number. A row goes when its job gets its turn.
create table tallybook.order_line (
  key    text not null,
  seq    bigint not null,
  job_id bigint not null,
  primary key (key, seq),
  constraint "an order key has 1 to 512 bytes" check (octet_length(key) between 1 and 512)
);
create index order_line_job on tallybook.order_line (job_id);
comment on table tallybook.order_line is 'Jobs with an order key that have not had their turn, in their order.';

-- A small ledger like unique_key: the newest row of a key says whose turn it is, for as long as that job is open.
create table tallybook.order_turn (
  key        text not null,
  generation bigint not null,
  job_id     bigint not null,
  primary key (key, generation)
);
comment on table tallybook.order_turn is 'Whose turn it is: the newest generation of a key, until that job has ended.';

-- An entry is never updated. What a conflict of unique keys changes in a job that stands in line is written here; whoever
-- claims it reads it, and promote moves the job where another lane or time was asked for. A job takes it along when it
-- goes back in line, and the row goes then.
create table tallybook.amendment (
  job_id   bigint primary key,
  args     jsonb,
  priority smallint,
  run_at   timestamptz,
  xid      xid8 not null default pg_current_xact_id()
);
comment on column tallybook.amendment.xid is 'The transaction that changed it last.';
comment on table tallybook.amendment is 'Changed args, priority or run_at of a job that stands in line.';

-- What _look answers; a type of its own, so that it can be asked for in a CASE, for the few jobs that have a unique key.
create type tallybook.looked as (busy boolean, args jsonb, run_at timestamptz, version jsonb);

create table tallybook.progress (
  job_id     bigint primary key,
  attempt    int not null,
  done       real,
  message    text,
  checkpoint jsonb,
  updated_at timestamptz not null,
  constraint "done goes from 0 to 1" check (done between 0 and 1)
);
comment on table tallybook.progress is 'How far a job says that it is, and where its next attempt can go on.';

create table tallybook.task (
  name          text primary key,
  app           text not null,
  summary       text,
  on_dead_task  text,
  on_dead_queue text,
  version       int not null default 1,
  aliases       text[] not null default '{}',
  definition    jsonb not null,
  registered_at timestamptz not null,
  constraint "versions start at 1" check (version >= 1)
);
comment on table tallybook.task is 'The catalogue: what each task is, as the workers that know it have said.';
comment on column tallybook.task.summary is 'One line for people, with {names} of args in it.';
comment on column tallybook.task.definition is 'Arguments, queue, retry policy and limits, for people.';

-- Functions whose parameters or columns have changed: the old ones would stay beside the new ones.
drop function if exists tallybook.enqueue(text, text, jsonb, timestamptz, int, text, int, jsonb);
drop function if exists tallybook.enqueue_many(text[], text[], text[], timestamptz[], int[], text[], int[], text[]);
drop function if exists tallybook._put(bigint, text, text, jsonb, timestamptz, int, text, int, jsonb, timestamptz);
drop function if exists tallybook._claim_key(text, text, bigint);
drop function if exists tallybook.leased(uuid);
drop function if exists tallybook.complete(uuid, bigint, int);
drop function if exists tallybook.complete_many(uuid[], bigint[], int[]);
drop function if exists tallybook.worker_start(text, text[], text[], boolean, timestamptz, interval);
drop function if exists tallybook._held(uuid[], bigint[], int[]);
drop function if exists tallybook._bury(tallybook.entry, text, timestamptz, int, int, jsonb);

-- Moving house: see functions/rebase.sql.
comment on column tallybook.lane.retired_at is 'Since when nobody lines up here: the database has moved to another cluster, and the lane has a successor.';
comment on column tallybook.lane.born is 'No entry of this lane can have a lower transaction id: where its first window opens. Of a retired lane: all below is over.';

-- Upgrades: replaced args bring the version of their form along.
alter table tallybook.amendment add column version jsonb;
comment on column tallybook.amendment.version is 'The version of the changed args; null with args: the first one.';
drop function if exists tallybook._claim_key(text, text, bigint, text, text, jsonb, int, timestamptz);
drop function if exists tallybook._amend(bigint, text, jsonb, int, timestamptz, boolean);
drop function if exists tallybook._look(bigint);
