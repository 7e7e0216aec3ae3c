-- 0003: time: services that any worker runs, schedules, subjects.

-- Services ---------------------------------------------------------------------------------------------------------

create table tallybook.service (
  name        text primary key,
  every       interval not null,
  last_run_at timestamptz,
  last_took   interval,
  last_effect bigint,
  constraint "a service runs every 0.1 s to 1 day" check (every between interval '100 ms' and interval '1 day')
) with (fillfactor = 50);
insert into tallybook.service (name, every) values ('promote', '5 s'), ('rescue', '5 s'), ('rebase', '5 s'), ('schedules', '5 s');
comment on table tallybook.service is 'Maintenance that any worker runs: how often at least, and what the last run did. Change every as you like.';
comment on column tallybook.service.every is 'The longest time between two looks of one worker; what is known to be due is not waited for.';
comment on column tallybook.service.last_run_at is 'Of the last run that is on record. One that has nothing to do runs once a minute, whatever every says.';
comment on column tallybook.service.last_effect is 'How many jobs, or rows, the last run that is on record has changed. At most one run a second is put on record.';

-- New parameters, at for the most: the old functions would stay beside the new ones.
drop function if exists tallybook._amend(bigint, text, jsonb, int, timestamptz, boolean, jsonb);
drop function if exists tallybook._amended(tallybook.entry);
drop function if exists tallybook._claim_key(text, text, bigint, text, text, jsonb, int, timestamptz, jsonb);
drop function if exists tallybook._end(uuid, bigint, int, tallybook.ending, jsonb);
drop function if exists tallybook._release(text, bigint);
drop function if exists tallybook._put_back(tallybook.waiting);
drop function if exists tallybook._release_missed();
drop function if exists tallybook._skip(int, "char", xid8[], bigint[]);
drop function if exists tallybook._take(int, "char", xid8, int, int, uuid, xid8);
drop function if exists tallybook.cancel(bigint, text);
drop function if exists tallybook.cancel_many(text, text, text, text, jsonb, text[], text, int);
drop function if exists tallybook.cancelled(uuid, bigint, int, text);
drop function if exists tallybook.claim(int, text[], int[], uuid, boolean);
drop function if exists tallybook.complete(uuid, bigint, int, jsonb);
drop function if exists tallybook.complete_many(uuid[], bigint[], int[], text[]);
drop function if exists tallybook._complete_with(uuid[], bigint[], int[], text[]);
drop function if exists tallybook._complete_again(uuid[], bigint[], int[], text[]);
drop function if exists tallybook._release_of(bigint[], text[]);
drop function if exists tallybook.enqueue(text, text, jsonb, timestamptz, int, text, int, jsonb, text, text, text, timestamptz, jsonb);
drop function if exists tallybook.enqueue_many(text[], text[], text[], timestamptz[], int[], text[], int[], text[], text[], text[], text[], timestamptz[], text[]);
drop function if exists tallybook.leased(uuid, bigint);
drop function if exists tallybook.move(uuid, bigint, int);
drop function if exists tallybook.progress(uuid, bigint, int, real, text);
drop function if exists tallybook.checkpoint(uuid, bigint, int, jsonb);
drop function if exists tallybook.promote(int, timestamptz, timestamptz);
drop function if exists tallybook.rebase(boolean, timestamptz);
drop function if exists tallybook.rescue(interval, interval, int, timestamptz, int);
drop function if exists tallybook.turn(uuid[], bigint[], int[], boolean);

-- Schedules --------------------------------------------------------------------------------------------------------

create table tallybook.schedule (
  name          text primary key,
  source        text not null,
  app           text,
  task          text not null,
  queue         text not null default 'default',
  args          jsonb not null default '{}',
  priority      int not null default 2,
  max_attempts  int,
  headers       jsonb,
  options       jsonb,
  cron          text,
  every         interval,
  query         text,
  tz            text not null default 'UTC',
  jitter        interval not null default '0',
  missed        text not null default 'once',
  catch_up      int not null default 100,
  overlap       boolean not null default false,
  paused_at     timestamptz,
  paused_by     text,
  revision      xid8 not null default pg_current_xact_id(),
  since         timestamptz not null,
  tick          timestamptz,
  due_at        timestamptz,
  last_job_id   bigint,
  line          bigint[],
  fired_count   bigint not null default 0,
  skipped_count bigint not null default 0,
  missed_count  bigint not null default 0,
  failed_count  bigint not null default 0,
  problem       text,
  created_at    timestamptz not null,
  changed_at    timestamptz not null,
  constraint "a schedule comes from code or from the database" check (source in ('code', 'database')),
  constraint "a schedule in code has an app" check ((source = 'code') = (app is not null)),
  constraint "a schedule has a cron expression or an interval" check (num_nonnulls(cron, every) = 1),
  constraint "missed is once, skip or all" check (missed in ('once', 'skip', 'all')),
  constraint "a paused schedule is not due" check (paused_at is null or due_at is null)
) with (fillfactor = 80);
create index schedule_due on tallybook.schedule (due_at) where due_at is not null and query is null;
create index schedule_query_due on tallybook.schedule (due_at) where due_at is not null and query is not null;
comment on table tallybook.schedule is 'A rule that enqueues by the clock: declared in code, or put here by schedule_put.';
comment on column tallybook.schedule.query is 'Where its jobs come from, for a query-driven one: see enqueue_from.';
comment on column tallybook.schedule.missed is 'What becomes of ticks that are found more than 60 s late: the latest is fired (once), none (skip), or up to catch_up (all).';
comment on column tallybook.schedule.overlap is 'Whether a tick is fired although the job of the last one has not ended for good.';
comment on column tallybook.schedule.revision is 'The transaction that changed the definition last: a plan made from an older one is not carried out.';
comment on column tallybook.schedule.since is 'Ticks after this instant count: when it was put, changed in time, or resumed.';
comment on column tallybook.schedule.tick is 'Its next tick; null: to be computed by a worker.';
comment on column tallybook.schedule.due_at is 'When its next tick is fired, jitter included; null while it is paused, or has no next tick.';
comment on column tallybook.schedule.line is 'Jobs before the last one that may be open still, of one that catches up.';
comment on column tallybook.schedule.problem is 'Why no worker can compute its ticks; it is tried again every hour.';

-- Who inserts the row has fired the tick. Nothing else decides: no leader, no clock.
create table tallybook.fire (
  schedule text not null,
  tick     timestamptz not null,
  fired_at timestamptz not null,
  what     text not null,
  reason   text,
  job_id   bigint,
  jobs     bigint,
  ticks    int,
  primary key (schedule, tick),
  constraint "a fire has an end" check (what in ('enqueued', 'skipped', 'missed', 'failed')),
  constraint "what was missed says how often" check ((what = 'missed') = (ticks is not null))
);
comment on table tallybook.fire is 'What became of each tick of each schedule.';
comment on column tallybook.fire.what is 'enqueued; skipped, since the last one still ran; missed, found too late; failed, with the error as reason.';
comment on column tallybook.fire.jobs is 'How many jobs were put in: of a query-driven schedule any number.';
comment on column tallybook.fire.ticks is 'Of missed ones: how many this row stands for, from its tick on. 1000 is 1000 or more.';

-- Subjects ---------------------------------------------------------------------------------------------------------

-- Written when a subject is made, revived, ended or forgotten, not by its iterations: those are the job's. What is null until
-- it has ended is what has to be known of it when its job's history has gone.
create table tallybook.subject_job (
  job_id     bigint not null,
  made_at    timestamptz not null,
  ended_at   timestamptz,
  last_at    timestamptz,
  priority   smallint,
  iterations int,
  attempts   int,
  failures   int,
  task       text not null,
  subject    text not null,
  ended_as   text,
  queue      text,
  args       jsonb,
  error      jsonb,
  primary key (task, subject),
  constraint "a subject has 1 to 512 bytes" check (octet_length(subject) between 1 and 512),
  constraint "a subject ends completed, killed or dead" check (ended_as in ('completed', 'killed', 'dead')),
  constraint "an ended subject says when" check ((ended_as is null) = (ended_at is null))
);
create index subject_of_job on tallybook.subject_job (job_id);
comment on table tallybook.subject_job is 'The job behind each subject: a named job that lives on. For people there is the view subject.';
comment on column tallybook.subject_job.ended_as is 'completed, killed or dead, until a person or an upsert revives it; null: it lives, or its job was cancelled.';

-- A job that lives on has thousands of attempts: the newest is found without reading the others. Jobs that succeed at their
-- first attempt are not in it.
create index entry_again on tallybook.entry (job_id, attempt) where attempt > 1;

-- Whoever is about to start a job that has a unique key, or is a subject's, learns that it was cancelled while he waited.
alter type tallybook.looked add attribute cancelled boolean;
