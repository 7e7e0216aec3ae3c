-- 0004: the outside world: providers and routes, webhooks' endpoints, parents, limits. Workers may run; no table of theirs is locked.

-- Providers and routes

-- Webhooks

-- Parents

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
  constraint "a window has 100 ms to 366 days" check (per between interval '100 ms' and interval '366 days')
);
-- What holds jobs that do not name it: asked for by every claim.
create index rate_limit_wide on tallybook.rate_limit (name) where name like 'queue:%' or name like 'task:%';
comment on table tallybook.rate_limit is 'Rules: at most so many calls per window. NAME holds the keys NAME and NAME:..., queue:NAME and task:NAME hold their jobs.';
comment on column tallybook.rate_limit.burst is 'How many calls may be made at once; never more than calls in any window for all that.';
comment on column tallybook.rate_limit.in_code is 'The app that declares it; null: it was put in by a person.';

-- One row per key that is in use, changed once per batch of jobs.
create table tallybook.rate_state (
  name      text primary key,
  next_at   timestamptz not null,
  front_at  timestamptz not null,
  pushed_to timestamptz,
  granted   bigint not null
) with (fillfactor = 50);
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

-- leased says of each job whether a limit holds it.
drop function if exists tallybook.leased(uuid, bigint, timestamptz);
