-- 0004: the outside world: providers and routes, webhooks' endpoints, parents, limits. Workers may run; waiting is locked for a moment.

-- Providers and routes

create table tallybook.provider (
  name       text primary key,
  kind       text not null,
  settings   jsonb not null default '{}',
  active     boolean not null default true,
  created_at timestamptz not null,
  changed_at timestamptz not null,
  constraint "settings are one JSON object" check (jsonb_typeof(settings) = 'object')
);
comment on table tallybook.provider is 'Whom jobs call: what anybody may read of a provider. Its secrets are in provider_secret.';
comment on column tallybook.provider.kind is 'What it is for, in your own words: market-data, webhook, smtp.';
comment on column tallybook.provider.active is 'One that is not is neither loaded nor chosen by a route.';

create table tallybook.provider_secret (
  provider   text not null references tallybook.provider on delete cascade,
  field      text not null,
  slot       text not null,
  key_id     text not null,
  nonce      bytea not null,
  ciphertext bytea not null,
  set_at     timestamptz not null,
  sealed_at  timestamptz not null,
  primary key (provider, field, slot),
  constraint "a slot is current or previous" check (slot in ('current', 'previous')),
  constraint "a nonce has 96 bits" check (octet_length(nonce) = 12),
  constraint "a ciphertext has a tag of 16 bytes" check (octet_length(ciphertext) between 16 and 65552)
);
create index provider_secret_key on tallybook.provider_secret (key_id);
comment on table tallybook.provider_secret is 'Secrets of providers, encrypted by programs with keys that the database never sees. See the view provider_field.';
comment on column tallybook.provider_secret.slot is 'previous: what it was before its last change, where that is still good.';
comment on column tallybook.provider_secret.key_id is 'Which of the keys it is encrypted with.';
comment on column tallybook.provider_secret.ciphertext is 'AES-256-GCM, the tag at its end; bound to provider, field, slot and key_id.';
comment on column tallybook.provider_secret.set_at is 'When the secret was given; sealed_at: when it was encrypted last, by a rotation of keys for example.';

create table tallybook.provider_route (
  data_type  text not null,
  symbol     text,
  provider   text not null references tallybook.provider,
  active     boolean not null default true,
  created_at timestamptz not null,
  changed_at timestamptz not null
);
create unique index provider_route_broad on tallybook.provider_route (data_type) where symbol is null;
create unique index provider_route_specific on tallybook.provider_route (data_type, symbol) where symbol is not null;
create index provider_route_provider on tallybook.provider_route (provider);
comment on table tallybook.provider_route is 'Which provider serves a kind of data: a rule for one symbol goes before the broad one, whose symbol is null.';

-- Webhooks

-- Parents

-- A job that waits for its parents lies in waiting without an order key: its own is in its options until it comes into line.
alter table tallybook.waiting alter column order_key drop not null;
create index waiting_of_child on tallybook.waiting ((options #>> '{parents,order_key}')) where order_key is null and options #>> '{parents,order_key}' is not null;
comment on table tallybook.waiting is 'A job that may not run yet because of others: its turn by its order key has not come, or its parents have not ended.';

create table tallybook.parent (
  child_id  bigint not null,
  parent_id bigint not null,
  place     int not null,
  ended_as  text,
  failure   jsonb,
  primary key (child_id, parent_id),
  constraint "no job waits for itself" check (child_id <> parent_id),
  constraint "a parent ends completed, cancelled, dead or gone" check (ended_as in ('completed', 'cancelled', 'dead', 'gone'))
);
create index parent_open on tallybook.parent (parent_id) where ended_as is null;
create index parent_of_child on tallybook.parent (child_id) where ended_as is null;
create index parent_failed on tallybook.parent (child_id) where failure is not null;
comment on table tallybook.parent is 'Which jobs a job in waiting waits for; the rows go when it comes into line, or is cancelled.';
comment on column tallybook.parent.ended_as is 'How the parent was seen to have ended; null: not yet. Written by who holds the row of the child in waiting.';
comment on column tallybook.parent.failure is 'What the child is told of a parent that did not complete.';
insert into tallybook.service (name, every) values ('settle', '5 s');

-- Limits

create table tallybook.rate_limit (
  name       text primary key,
  calls      int not null,
  per        interval not null,
  burst      int not null default 1,
  in_code    text,
  created_at timestamptz not null default clock_timestamp(),
  changed_at timestamptz not null default clock_timestamp(),
  constraint "a limit's name has 1 to 200 bytes" check (octet_length(name) between 1 and 200),
  constraint "a rate limit has 1 to 100000 calls" check (calls between 1 and 100000),
  constraint "a burst has 1 to all calls" check (burst between 1 and calls),
  constraint "a window has 1 s to 366 days" check (per between interval '1 s' and interval '366 days')
);
-- What holds jobs that do not name it: asked for by every claim.
create index rate_limit_wide on tallybook.rate_limit (name) where name like 'queue:%' or name like 'task:%';
comment on table tallybook.rate_limit is 'Rules: at most so many calls per window. NAME holds the keys NAME and NAME:..., queue:NAME and task:NAME hold their jobs.';
comment on column tallybook.rate_limit.burst is 'How many calls may be made at once; never more than calls in any window for all that.';
comment on column tallybook.rate_limit.in_code is 'The app that declares it; null: it was put in by a person.';

create table tallybook.concurrency_limit (
  name       text primary key,
  most       int not null,
  in_code    text,
  created_at timestamptz not null default clock_timestamp(),
  changed_at timestamptz not null default clock_timestamp(),
  constraint "a limit's name has 1 to 200 bytes" check (octet_length(name) between 1 and 200),
  constraint "a concurrency limit lets 1 to 10000 run" check (most between 1 and 10000)
);
create index concurrency_limit_wide on tallybook.concurrency_limit (name) where name like 'queue:%' or name like 'task:%';
comment on table tallybook.concurrency_limit is 'Rules: at most so many at once. Names as in rate_limit; a key may have a rule of both kinds.';

-- Which attempts run under a key, or are next: each holds its place until it has an outcome. Rows of the ended go with the next look.
create table tallybook.concurrency_holder (
  xid       xid8 not null,
  seq       bigint not null,
  job_id    bigint not null,
  retention "char" not null,
  probe     boolean not null default false,
  name      text not null
);
comment on column tallybook.concurrency_holder.probe is 'It is the one job that a breaker has let through to see whether the key works again.';
create index concurrency_holder_of on tallybook.concurrency_holder (name);

-- Who waits for a place, in this order. Their jobs are in waiting.
create table tallybook.concurrency_line (
  seq      bigint not null,
  job_id   bigint not null,
  priority smallint not null,
  name     text not null,
  primary key (name, priority, seq)
);
create index concurrency_line_of_job on tallybook.concurrency_line (job_id);
insert into tallybook.service (name, every) values ('places', '5 s');

create table tallybook.breaker_rule (
  name       text primary key,
  failures   int not null,
  per        interval not null,
  open_for   interval not null,
  in_code    text,
  created_at timestamptz not null default clock_timestamp(),
  changed_at timestamptz not null default clock_timestamp(),
  constraint "a limit's name has 1 to 200 bytes" check (octet_length(name) between 1 and 200),
  constraint "a breaker opens after 1 to 1000 failures" check (failures between 1 and 1000),
  constraint "a window has 1 s to 366 days" check (per between interval '1 s' and interval '366 days'),
  constraint "a breaker is open for 1 s to 366 days" check (open_for between interval '1 s' and interval '366 days')
);
create index breaker_rule_wide on tallybook.breaker_rule (name) where name like 'queue:%' or name like 'task:%';
comment on table tallybook.breaker_rule is 'Rules: after so many failures within a window the jobs of a key wait. Names as in rate_limit.';
comment on column tallybook.breaker_rule.open_for is 'How long they wait before one of them is let through as a probe.';

create table tallybook.breaker_state (
  name       text primary key,
  state      text not null default 'closed',
  failed_at  timestamptz[] not null default '{}',
  changed_at timestamptz not null,
  open_until timestamptz,
  constraint "a breaker is closed, open or half-open" check (state in ('closed', 'open', 'half-open'))
);
comment on table tallybook.breaker_state is 'Where the breaker of a key stands, changed under the lock of its row in rate_state. For people there is the view breaker.';
comment on column tallybook.breaker_state.failed_at is 'The newest failures, since it was closed last.';

-- One row per key that is in use, changed once per batch of jobs.
create table tallybook.rate_state (
  name      text primary key,
  next_at   timestamptz not null,
  front_at  timestamptz not null,
  pushed_to timestamptz,
  granted   bigint not null,
  promised_at timestamptz not null default '-infinity',
  paced_to  timestamptz not null default '-infinity'
) with (fillfactor = 50);
comment on column tallybook.rate_state.front_at is 'Behind the last that came back to its turn in vain.';
comment on column tallybook.rate_state.promised_at is 'Which start the next one gets that promote lets come back: not more of them come than can start.';
comment on column tallybook.rate_state.paced_to is 'Behind the last that was late for its turn and was given a new one.';
comment on table tallybook.rate_state is 'Where each key of a rate limit stands: next_at is when its next call may start.';

-- LEDGER. What was let through, success or not: that is its attempt's outcome.
create table tallybook.rate_call (
  called_at timestamptz not null,
  job_id    bigint not null,
  attempt   int not null,
  name      text not null
);
create index rate_call_line on tallybook.rate_call (name, called_at);
comment on table tallybook.rate_call is 'LEDGER: one row is one call that a rate limit has let through. For people there is the view rate.';

-- Who waits for its turn at a limit, and until when.
create index scheduled_turn on tallybook.scheduled ((options ->> 'turn'), run_at) where options ? 'turn';

-- Who comes back to a limit stands in the part 'turn' of its lane, which every worker walks.
update tallybook.worker set parts = parts || 'turn'::text where ended_at is null;
comment on column tallybook.lane.part is 'Empty, ''turn'' for jobs whose turn at a limit has come, or ''task:NAME'' for jobs whose task the workers that met them did not know.';

-- leased says of each job whether a limit holds it.
drop function if exists tallybook.leased(uuid, bigint, timestamptz);

-- Fairness

-- Jobs whose turn among the keys of their queue has not come; fair_seq is their order within a key: a late row is behind, never before.
alter table tallybook.waiting add column fair_key text collate "C", add column fair_seq bigint;
create index waiting_fair on tallybook.waiting (lane_id, fair_key, fair_seq) where fair_key is not null;
create index waiting_fair_new on tallybook.waiting (lane_id, fair_seq) where fair_key is not null;
comment on column tallybook.waiting.fair_key is 'It waits for its turn among the keys of its queue: see deal. Null: it waits for something else.';

-- One row per fair lane, the newest: whom the last deal came to. Each deal appends one and takes the one before away.
create table tallybook.fair_turn (
  lane_id  int not null,
  number   bigint not null,
  fair_key text collate "C" not null,
  primary key (lane_id, number)
);
comment on table tallybook.fair_turn is 'Where the rounds of each lane of fair jobs stand: the key that was served last.';
create index lane_fair on tallybook.lane (lane_id) where part = 'fair';
insert into tallybook.service (name, every) values ('deal', '5 s');
update tallybook.worker set parts = parts || 'fair'::text where ended_at is null;
comment on column tallybook.lane.part is 'Empty, ''turn'' for jobs whose turn at a limit has come, ''fair'' for jobs whose turn among the keys of their queue has come, or ''task:NAME'' for jobs whose task the workers that met them did not know.';

-- Roles

create table tallybook.role (
  kind text primary key,
  name name not null unique,
  constraint "there are five kinds of roles" check (kind in ('producer', 'worker', 'operator', 'reader', 'metrics'))
);
comment on table tallybook.role is 'The roles that `tallybook roles` has given rights; none: everything runs with the caller''s rights.';
