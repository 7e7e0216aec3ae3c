-- Which transactions the counters have taken in: all that are visible in the snapshot (hi, holes). The newest row
-- counts.
--> LEDGER: up to where the counters have been folded, like the window of a claim: all below hi, but for holes.
create table tallybook.fold (
  number     bigint primary key,
  folded_at  timestamptz not null,
  hi         xid8 not null,
  holes      xid8[] not null,
  --> Where the sequence of job ids stood: unchanged, and nothing has come into line since.
  last_job   bigint not null,
  --> The fold whose sums are in total: a reader adds what later folds have put into series.
  checkpoint bigint not null
);

--> Sums of all that was folded up to a checkpoint.
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
alter table tallybook.total replica identity full;

-- What each fold has found, then thinned out with age. Read by range, from a number or a time on, so that rows which
-- are gone cost no reader anything.
--> Changes per step of time: what a fold has found (step 0), summed up to minutes, hours and days as it ages.
create table tallybook.series (
  --> The beginning of the step; of a fold its time.
  at       timestamptz not null,
  number   bigint,
  n        bigint not null,
  attempts bigint not null default 0,
  lane_id  int,
  --> Seconds: 0, 60, 3600, 86400.
  step     int not null,
  bucket   smallint,
  what     tallybook.counted not null,
  task     text not null
);
create index series_of_fold on tallybook.series (number) where step = 0;
create index series_line on tallybook.series (step, at);
alter table tallybook.series replica identity full;

--> How long each step of the series is kept before it is summed up to the next one; the last one goes.
create table tallybook.series_step (
  step       int primary key,
  keep       interval not null,
  thinned_to timestamptz not null default '-infinity',
  constraint "a step is a fold, a minute, an hour or a day" check (step in (0, 60, 3600, 86400)),
  constraint "a step is kept for 15 min to 100 years" check (keep between interval '15 min' and interval '100 years')
);
insert into tallybook.series_step (step, keep) values
  (0, '15 min'), (60, '2 days'), (3600, '90 days'), (86400, '10 years');

insert into tallybook.service (name, every) values ('fold', '5 s');

insert into tallybook.fold (number, folded_at, hi, holes, last_job, checkpoint)
select 0, clock_timestamp(), pg_snapshot_xmax(s.now), array(select x from pg_snapshot_xip(s.now) x), q.last_value, 0
  from (select pg_current_snapshot() as now) s, tallybook.job_id q;
