--> The rules of limits, one row per kind (rate, concurrency, breaker) and name. NAME holds the keys NAME and NAME:...,
--> queue:NAME and task:NAME hold their jobs. A name may have a rule of each kind.
create table tallybook.limit_rule (
  kind       text not null,
  name       text not null,
  --> Calls per window, jobs at the same time, or failures within a window that open a breaker.
  most       int not null,
  per        interval,
  --> How many calls may start at once; still never more than calls in any window.
  burst      int,
  --> How long jobs wait before one of them starts as a probe.
  open_for   interval,
  --> The app that declares it; null: a person set it.
  in_code    text,
  --> A job that finds all permits taken is cancelled instead of waiting.
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
-- The rules for jobs that do not name them, which every claim reads.
create index limit_rule_wide on tallybook.limit_rule (name) where name like 'queue:%' or name like 'task:%';

-- The attempts that run with a permit of a key, or are next: each holds it until it has an outcome. Rows of ended ones
-- are deleted by the next look.
create table tallybook.concurrency_holder (
  xid       xid8 not null,
  seq       bigint not null,
  job_id    bigint not null,
  retention "char" not null,
  --> The one job that a breaker has started to check whether the key works again.
  probe     boolean not null default false,
  name      text not null
);
create index concurrency_holder_of on tallybook.concurrency_holder (name);
alter table tallybook.concurrency_holder replica identity full;

-- The order of jobs that wait for a permit. The jobs are in waiting.
create table tallybook.concurrency_line (
  seq      bigint not null,
  job_id   bigint not null,
  priority smallint not null,
  name     text not null,
  primary key (name, priority, seq)
);
create index concurrency_line_of_job on tallybook.concurrency_line (job_id);

--> The state of the breaker of a key, changed under the lock of its row in rate_state. For people: the view breaker.
create table tallybook.breaker_state (
  name       text primary key,
  state      text not null default 'closed',
  --> The newest failures since it was last closed.
  failed_at  timestamptz[] not null default '{}',
  changed_at timestamptz not null,
  open_until timestamptz,
  constraint "a breaker is closed, open or half-open" check (state in ('closed', 'open', 'half-open'))
);

-- One row per key that is in use, changed once per batch of jobs.
--> The state of each key of a rate limit; next_at is when its next call may start.
create table tallybook.rate_state (
  name        text primary key,
  next_at     timestamptz not null,
  --> Behind the last job that came back to its turn in vain.
  front_at    timestamptz not null,
  pushed_to   timestamptz,
  granted     bigint not null,
  --> The start of the next job that promote moves: no more come back than can start.
  promised_at timestamptz not null default '-infinity',
  --> The place behind the last job that was late for its turn and got a new one.
  paced_to    timestamptz not null default '-infinity',
  --> The longest delay of a start since the last longer gap; the next longer gap is longer by that.
  lag         interval not null default '0'
) with (fillfactor = 50);

-- LEDGER. The granted calls; their success is their attempt's outcome.
--> LEDGER: one row per call that a rate limit has granted. For people: the view rate.
create table tallybook.rate_call (
  called_at timestamptz not null,
  job_id    bigint not null,
  attempt   int not null,
  name      text not null
);
create index rate_call_line on tallybook.rate_call (name, called_at);
alter table tallybook.rate_call replica identity full;

-- The jobs that wait for their turn at a limit, with their times.
create index scheduled_turn on tallybook.scheduled ((options ->> 'turn'), run_at) where options ? 'turn';

insert into tallybook.service (name, every) values ('concurrency_release', '5 s');

-- The state of a key and of a job within one call of limit_take. A key has a rate if gap is not null, and permits or a
-- breaker if free is not null.
--   tail_at     behind the last waiting job
--   gap, step   between two starts; step as estimated for waiting jobs
--   late, lag   the longest delay of a start: of this question, and of all since the last longer gap
--   every       the number of calls after which a gap is longer by lag
create type tallybook._limit_key as (
  name text, next_at timestamptz, front_at timestamptz, granted bigint, tail_at timestamptz, gap interval,
  step interval, late interval, lag interval, burst int, every int, free int, probing boolean, barred boolean,
  has_line boolean
);
--   front           it goes before new jobs
--   special         it may have been changed: it has a unique key
--   until, behind   it must wait until then, behind others of this key
create type tallybook._limited_job as (
  lease uuid, job_id bigint, attempt int, lane_id int, retention "char", xid xid8, seq bigint, priority int,
  front boolean, special boolean, limits text[], until timestamptz, behind text
);
