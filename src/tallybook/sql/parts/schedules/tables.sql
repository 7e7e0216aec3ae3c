--> A rule that enqueues by the clock, declared in code or set by schedule_set.
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
  --> The query that gives its jobs: see enqueue_from.
  query         text,
  tz            text not null default 'UTC',
  jitter        interval not null default '0',
  --> What happens to ticks that are found more than 60 s late: the latest is fired (once), none (skip), or up to
  --> catch_up (all).
  missed        text not null default 'once',
  catch_up      int not null default 100,
  --> Whether a tick is fired while the job of the last one is open.
  overlap       boolean not null default false,
  paused_at     timestamptz,
  paused_by     text,
  --> The last transaction that changed the definition; a plan made from an older one is not used.
  revision      xid8 not null default pg_current_xact_id(),
  --> Ticks after this time count: when it was set, its time was changed, or it was resumed.
  since         timestamptz not null,
  --> Its next tick; null: a worker must compute it.
  tick          timestamptz,
  --> When its next tick is fired, with jitter; null while it is paused, or has no next tick.
  due_at        timestamptz,
  last_job_id   bigint,
  --> While it catches up: jobs before the last one that may be open.
  line          bigint[],
  fired_count   bigint not null default 0,
  skipped_count bigint not null default 0,
  missed_count  bigint not null default 0,
  failed_count  bigint not null default 0,
  --> Why no worker can compute its ticks; they try again every hour.
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

-- The session that inserts the row has fired the tick. Nothing else decides: no leader, no clock.
--> The result of each tick of each schedule.
create table tallybook.fire (
  schedule text not null,
  tick     timestamptz not null,
  fired_at timestamptz not null,
  --> enqueued; skipped, since the last one still ran; missed, found too late; failed, with the error as reason.
  what     text not null,
  reason   text,
  job_id   bigint,
  --> The number of enqueued jobs; any number for a query-driven schedule.
  jobs     bigint,
  --> For missed ticks: how many this row counts, from its tick on. 1000 means 1000 or more.
  ticks    int,
  primary key (schedule, tick),
  constraint "a fire has an end" check (what in ('enqueued', 'skipped', 'missed', 'failed')),
  constraint "what was missed says how often" check ((what = 'missed') = (ticks is not null))
);

-- The plan that a worker has computed for a due schedule: see _schedules_fire.
create type tallybook._plan as (name text, revision xid8, tick timestamptz, late timestamptz[], ticks timestamptz[],
  missed_from timestamptz, missed_ticks int, next timestamptz, due timestamptz, problem text, now boolean);

insert into tallybook.service (name, every) values ('schedules', '5 s');
