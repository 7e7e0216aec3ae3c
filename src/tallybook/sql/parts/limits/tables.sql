create table tallybook.limit_rule (
  kind       text not null,
  name       text not null,
  most       int not null,
  per        interval,
  burst      int,
  open_for   interval,
  in_code    text,
  skips      boolean not null default false,
  created_at timestamptz not null default clock_timestamp(),
  changed_at timestamptz not null default clock_timestamp(),
  primary key (kind, name),
  constraint "a limit's name has 1 to 200 bytes" check (octet_length(name) between 1 and 200),
  constraint "a limit allows 1 to 100000 calls, 10000 permits or 1000 failures"
    check (most between 1 and case kind when 'rate' then 100000 when 'concurrency' then 10000 else 1000 end),
  constraint "a limit is a rate, a concurrency or a breaker" check (kind in ('rate', 'concurrency', 'breaker')),
  constraint "a rate has a burst of 1 to all calls, a breaker the time that it is open, both a window"
    check ((kind = 'rate') = (burst is not null) and (kind = 'breaker') = (open_for is not null)
           and (kind = 'concurrency') = (per is null) and burst between 1 and most),
  constraint "a window has 1 s to 366 days" check (per between interval '1 s' and interval '366 days'),
  constraint "a breaker is open for 1 s to 366 days" check (open_for between interval '1 s' and interval '366 days')
);
-- What holds jobs that do not name it: asked for by every claim.
create index limit_rule_wide on tallybook.limit_rule (name) where name like 'queue:%' or name like 'task:%';
comment on table tallybook.limit_rule is
  'The rules of limits, one row per kind (rate, concurrency, breaker) and name. NAME holds the keys NAME and NAME:..., '
  'queue:NAME and task:NAME hold their jobs. A name may have a rule of each kind.';
comment on column tallybook.limit_rule.most is
  'How many calls a window has, how many jobs run at once, or after how many failures within a window a breaker opens.';
comment on column tallybook.limit_rule.burst is
  'How many calls may be made at once; never more than calls in any window for all that.';
comment on column tallybook.limit_rule.open_for is 'How long jobs wait before one of them is let through as a probe.';
comment on column tallybook.limit_rule.skips is
  'A job that finds the permits taken does not wait: it is cancelled. Of a concurrency limit that code declares.';
comment on column tallybook.limit_rule.in_code is 'The app that declares it; null: it was put in by a person.';

-- Which attempts run under a key, or are next: each holds its permit until it has an outcome. Rows of the ended go
-- with the next look.
create table tallybook.concurrency_holder (
  xid       xid8 not null,
  seq       bigint not null,
  job_id    bigint not null,
  retention "char" not null,
  probe     boolean not null default false,
  name      text not null
);
comment on column tallybook.concurrency_holder.probe is
  'It is the one job that a breaker has let through to see whether the key works again.';
create index concurrency_holder_of on tallybook.concurrency_holder (name);
alter table tallybook.concurrency_holder replica identity full;

-- Who waits for a permit, in this order. Their jobs are in waiting.
create table tallybook.concurrency_line (
  seq      bigint not null,
  job_id   bigint not null,
  priority smallint not null,
  name     text not null,
  primary key (name, priority, seq)
);
create index concurrency_line_of_job on tallybook.concurrency_line (job_id);

create table tallybook.breaker_state (
  name       text primary key,
  state      text not null default 'closed',
  failed_at  timestamptz[] not null default '{}',
  changed_at timestamptz not null,
  open_until timestamptz,
  constraint "a breaker is closed, open or half-open" check (state in ('closed', 'open', 'half-open'))
);
comment on table tallybook.breaker_state is
  'Where the breaker of a key stands, changed under the lock of its row in rate_state. For people there is the '
  'view breaker.';
comment on column tallybook.breaker_state.failed_at is 'The newest failures, since it was closed last.';

-- One row per key that is in use, changed once per batch of jobs.
create table tallybook.rate_state (
  name        text primary key,
  next_at     timestamptz not null,
  front_at    timestamptz not null,
  pushed_to   timestamptz,
  granted     bigint not null,
  promised_at timestamptz not null default '-infinity',
  paced_to    timestamptz not null default '-infinity',
  lag         interval not null default '0'
) with (fillfactor = 50);
comment on column tallybook.rate_state.front_at is 'Behind the last that came back to its turn in vain, or would have.';
comment on column tallybook.rate_state.promised_at is
  'Which start the next one gets that promote lets come back: not more of them come than can start.';
comment on column tallybook.rate_state.paced_to is
  'Behind the last that was late for its turn and was given a new one.';
comment on column tallybook.rate_state.lag is
  'By how much a start since the last longer gap may be late: the next longer gap is longer by that.';
comment on table tallybook.rate_state is
  'Where each key of a rate limit stands: next_at is when its next call may start.';

-- LEDGER. What was let through, success or not: that is its attempt's outcome.
create table tallybook.rate_call (
  called_at timestamptz not null,
  job_id    bigint not null,
  attempt   int not null,
  name      text not null
);
create index rate_call_line on tallybook.rate_call (name, called_at);
comment on table tallybook.rate_call is
  'LEDGER: one row is one call that a rate limit has let through. For people there is the view rate.';
alter table tallybook.rate_call replica identity full;

-- Who waits for its turn at a limit, and until when.
create index scheduled_turn on tallybook.scheduled ((options ->> 'turn'), run_at) where options ? 'turn';

insert into tallybook.service (name, every) values ('concurrency_release', '5 s');

-- What one call of limit_take knows of a key and of a job. A key has a rate where gap is not null, and permits or a
-- breaker where free is not null.
create type tallybook._limit_key as (
  name     text,
  next_at  timestamptz,
  front_at timestamptz,
  granted  bigint,
  tail_at  timestamptz,  -- behind the last that waits
  gap      interval,     -- between two starts
  step     interval,     -- the same, as estimated for those who wait
  late     interval,     -- a start of this question is late by at most so much
  lag      interval,     -- the same of all since the last longer gap
  burst    int,
  every    int,          -- so many calls make one gap longer by lag
  free     int,
  probing  boolean,
  barred   boolean,
  has_line boolean
);
create type tallybook._limited_job as (
  lease     uuid,
  job_id    bigint,
  attempt   int,
  lane_id   int,
  retention "char",
  xid       xid8,
  seq       bigint,
  priority  int,
  front     boolean,     -- it goes before newcomers
  special   boolean,     -- it may have been changed: it has a unique key
  limits    text[],
  until     timestamptz, -- it has to wait so long,
  behind    text         -- behind others of this key
);
