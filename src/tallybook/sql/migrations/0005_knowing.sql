-- 0005: knowing: counters, history, queues as things, why and trace. Workers may run; the tables that get a trigger are locked for a moment,
-- entry while two indexes of few of its rows are made, which read it once each.

-- Counters

-- What is counted: where jobs are (opened: come into line), how attempts have ended (unclaimed: those of them that nobody
-- had claimed), and events of your own. took and waited are the times of completed ones, in buckets.
create type tallybook.counted as enum ('opened', 'scheduled', 'retrying', 'waiting', 'dead',
  'completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'died', 'unclaimed', 'event', 'took', 'waited');

-- LEDGER, short-lived. What a statement has changed: it is never updated, so no two statements wait for each other. What comes into line is
-- not in it: that is read from entry itself.
create table tallybook.tally (
  xid      xid8 not null default pg_current_xact_id(),
  lane_id  int,
  n        int not null,
  attempts int not null default 0,
  what     tallybook.counted not null,
  took     smallint,
  waited   smallint,
  task     text not null
) partition by range (xid);
create index tally_line on tallybook.tally (xid) with (fillfactor = 100);
comment on table tallybook.tally is 'LEDGER: what one statement has changed, per lane, task and state. Folded into series and total, then pruned.';
comment on column tallybook.tally.lane_id is 'Null: an event of your own, whose name is in task.';
comment on column tallybook.tally.attempts is 'The sum of the attempt numbers of these jobs.';
comment on column tallybook.tally.took is 'From claim to end of these jobs, as a bucket: see _bucket.';
comment on column tallybook.tally.waited is 'From when they could run to their claim, as a bucket.';

-- Which transactions the counters have taken in: all that are visible in the snapshot (hi, holes). The newest row counts.
create table tallybook.fold (
  number     bigint primary key,
  folded_at  timestamptz not null,
  hi         xid8 not null,
  holes      xid8[] not null,
  last_job   bigint not null,
  checkpoint bigint not null
);
comment on table tallybook.fold is 'LEDGER: up to where the counters have been folded, like the window of a claim: all below hi, but for holes.';
comment on column tallybook.fold.last_job is 'Where the sequence of job ids stood: unchanged, and nothing has come into line since.';
comment on column tallybook.fold.checkpoint is 'The fold whose sums are in total: a reader adds what later folds have put into series.';

create table tallybook.total (
  checkpoint bigint not null,
  n          bigint not null,
  attempts   bigint not null,
  last_at    timestamptz,
  lane_id    int,
  what       tallybook.counted not null,
  task       text not null
);
create index total_of on tallybook.total (checkpoint);
comment on table tallybook.total is 'Sums of all that was folded up to a checkpoint.';

-- What each fold has found, then thinned out with age. Read by range, from a number or a time on, so that rows which are gone cost no
-- reader anything.
create table tallybook.series (
  at       timestamptz not null,
  number   bigint,
  n        bigint not null,
  attempts bigint not null default 0,
  lane_id  int,
  step     int not null,
  bucket   smallint,
  what     tallybook.counted not null,
  task     text not null
);
create index series_of_fold on tallybook.series (number) where step = 0;
create index series_line on tallybook.series (step, at);
comment on table tallybook.series is 'Changes per step of time: what a fold has found (step 0), summed up to minutes, hours and days as it ages.';
comment on column tallybook.series.at is 'The beginning of the step; of a fold its time.';
comment on column tallybook.series.step is 'Seconds: 0, 60, 3600, 86400.';

-- Without a key, but rows of theirs are deleted: where they are published for logical replication that needs an identity.
alter table tallybook.total replica identity full;
alter table tallybook.series replica identity full;

create table tallybook.series_step (
  step       int primary key,
  keep       interval not null,
  thinned_to timestamptz not null default '-infinity',
  constraint "a step is a fold, a minute, an hour or a day" check (step in (0, 60, 3600, 86400)),
  constraint "a step is kept for 15 min to 100 years" check (keep between interval '15 min' and interval '100 years')
);
insert into tallybook.series_step (step, keep) values (0, '15 min'), (60, '2 days'), (3600, '90 days'), (86400, '10 years');
comment on table tallybook.series_step is 'How long each step of the series is kept before it is summed up to the next one; the last one goes.';

-- What prune has taken out of the ledgers, so that a recount can still be held against the totals.
create table tallybook.pruned (
  pruned_at timestamptz not null,
  retention "char" not null,
  lower     xid8,
  upper     xid8,
  entries   bigint not null,
  ended     jsonb not null
);
comment on table tallybook.pruned is 'One row is one range of the ledgers that was dropped: how many attempts, and how many of each end.';

insert into tallybook.service (name, every) values ('fold', '5 s');

do $$
declare
  v_next text := (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 5000000)::text;
begin
  execute format('create table tallybook.tally_1 partition of tallybook.tally for values from (minvalue) to (%L)', v_next);
  execute format('create table tallybook.tally_2 partition of tallybook.tally for values from (%L) to (maxvalue)', v_next);
  -- A new installation has nothing to count; in an older one the first fold recounts.
  if not exists (select from tallybook.entry) and not exists (select from tallybook.scheduled)
     and not exists (select from tallybook.waiting) and not exists (select from tallybook.dead) then
    insert into tallybook.fold (number, folded_at, hi, holes, last_job, checkpoint)
    select 0, clock_timestamp(), pg_snapshot_xmax(s.now), array(select x from pg_snapshot_xip(s.now) x), q.last_value, 0
      from (select pg_current_snapshot() as now) s, tallybook.job_id q;
  end if;
end $$;

-- Where jobs are that are not in line is counted by triggers, whatever moves them. What they do comes from functions/_tally.sql.
create function tallybook._count_moved() returns trigger language plpgsql as $$ begin return null; end $$;
create trigger counts_in after insert on tallybook.scheduled referencing new table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_out after delete on tallybook.scheduled referencing old table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_changed after update on tallybook.scheduled for each row
  when ((old.lane_id, old.attempt, old.failures > 0) is distinct from (new.lane_id, new.attempt, new.failures > 0)
        and coalesce(current_setting('tallybook.counting', true), '') <> 'off')
  execute function tallybook._count_moved();
create trigger counts_in after insert on tallybook.waiting referencing new table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_out after delete on tallybook.waiting referencing old table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_changed after update on tallybook.waiting for each row
  when ((old.lane_id, old.attempt, old.failures > 0) is distinct from (new.lane_id, new.attempt, new.failures > 0)
        and coalesce(current_setting('tallybook.counting', true), '') <> 'off')
  execute function tallybook._count_moved();
create trigger counts_in after insert on tallybook.dead referencing new table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_out after delete on tallybook.dead referencing old table as moved
  for each statement execute function tallybook._count_moved();
create trigger counts_changed after update on tallybook.dead for each row
  when ((old.lane_id, old.attempt, old.failures > 0) is distinct from (new.lane_id, new.attempt, new.failures > 0)
        and coalesce(current_setting('tallybook.counting', true), '') <> 'off')
  execute function tallybook._count_moved();

-- What was started when: for times.
drop function if exists tallybook._held(uuid[], bigint[], int[]);
drop function if exists tallybook._open_attempts(int, bigint);

-- History

create table tallybook.retention_class (
  name text primary key,
  code "char" unique,
  keep interval not null,
  what text not null,
  constraint "history is kept 1 minute to 100 years" check (keep between interval '1 minute' and interval '100 years')
);
insert into tallybook.retention_class (name, code, keep, what) values
  ('brief', 'b', '1 hour', 'ended jobs of queues of this class'),
  ('default', 'd', '7 days', 'ended jobs of queues of this class, and the calls that rate limits have let through'),
  ('long', 'l', '90 days', 'ended jobs of queues of this class'),
  ('dead', null, '30 days', 'dead letters'),
  ('fires', null, '90 days', 'what became of the ticks of schedules');
comment on table tallybook.retention_class is 'How long what is kept. For people there are the view retentions and the verb retention_put.';
comment on column tallybook.retention_class.code is 'The letter of the class in the ledgers; null: it is swept row by row, in small batches.';

-- What the service prune has found out about a range of transaction ids whose transactions have all ended: it is counted piece by
-- piece, and what was found does not change any more.
create table tallybook.history_range (
  leaf        name primary key,
  files       oid[] not null,
  quiet_since timestamptz not null,
  entries_to  bigint not null default 0,
  entries     bigint not null default 0,
  outcomes_to bigint not null default 0,
  outcomes    bigint not null default 0,
  states      jsonb not null default '{}',
  newest_end  timestamptz,
  open        bigint,
  complete    boolean not null default false,
  again_at    timestamptz,
  checked     jsonb not null default '{}',
  held        text
);
comment on column tallybook.history_range.files is 'The database and the files that were counted: after a restore, or a rewrite of a table, counting starts anew.';
comment on column tallybook.history_range.entries_to is 'How many blocks of the entries were counted; outcomes_to: of the outcomes.';
comment on column tallybook.history_range.complete is 'Each entry has its outcome: nothing in it is open, for ever.';
comment on column tallybook.history_range.checked is 'By worker: all of its claims in the range up to this one have ended.';
comment on column tallybook.history_range.held is 'Why it was not dropped when that was tried last. For people there is held_ranges().';

create table tallybook.xid_rate (
  one         boolean primary key default true check (one),
  measured_at timestamptz not null,
  xid         xid8 not null,
  per_second  float8
);
comment on table tallybook.xid_rate is 'How many transaction ids this cluster gives out a second, over about an hour: how wide a range of history is.';

create table tallybook.sweep (
  kind  text primary key,
  place jsonb not null
);
comment on table tallybook.sweep is 'Where the next sweep of a small table goes on.';
insert into tallybook.service (name, every) values ('prune', '1 min');

-- Queues

alter table tallybook.queue add column max_attempts smallint, add column notify boolean not null default false,
  add column changed_at timestamptz, add column changed_by text,
  add constraint "max_attempts goes from 1 to 32767" check (max_attempts between 1 and 32767);
comment on column tallybook.queue.max_attempts is 'How many failures end a job of this queue where neither it nor its task says so; null: 5.';
comment on column tallybook.queue.notify is 'Whether its jobs'' transitions are published on the channel tallybook_jobs.';
comment on column tallybook.queue.retention is 'The class of the lanes that producers use from now on; a lane keeps the class of its birth.';
alter table tallybook.lane add column dropped pg_snapshot;
comment on column tallybook.lane.dropped is 'Its queue was dropped: what had committed by then does not count for whether there is such a queue.';
-- Of one queue, in the order of their time: who tops or truncates a queue reads nothing of others.
create index scheduled_of_lane on tallybook.scheduled (lane_id, run_at);
create index waiting_of_lane on tallybook.waiting (lane_id) where fair_key is null;
drop function if exists tallybook._take(int, "char", xid8, int, int, uuid, xid8, timestamptz);
drop function if exists tallybook.resume(text);

-- Why and trace

-- The jobs of a row of yours, by headers.links, which few jobs have: the others are in none of these and cost nothing. GIN, since a job
-- may have several; without a list of pending rows, which every look-up would read and now and then a producer would have to sort in.
-- entry is locked for writes while its two are made, each of which reads it once; none of its rows is in the first.
create index entry_linked on tallybook.entry using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index scheduled_linked on tallybook.scheduled using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index waiting_linked on tallybook.waiting using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index dead_linked on tallybook.dead using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';

-- The jobs that a subject has had: one row a job, none for its iterations.
create index entry_of_subject on tallybook.entry (unique_key) where attempt = 1 and options ? 'subject';
