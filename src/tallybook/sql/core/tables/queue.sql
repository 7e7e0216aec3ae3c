--> Settings of a queue. Producers never write here: a queue that has no row has the defaults.
create table tallybook.queue (
  name         text primary key,
  --> The class of the lanes that producers use from now on; a lane keeps the class of its birth.
  retention    text not null default 'default',
  paused_at    timestamptz,
  paused_by    text,
  created_at   timestamptz not null default clock_timestamp(),
  --> How many failures end a job of this queue if neither it nor its task has a limit; null: 5.
  max_attempts smallint,
  --> Whether its jobs' transitions are published on the channel tallybook_jobs.
  notify       boolean not null default false,
  changed_at   timestamptz,
  changed_by   text,
  constraint "a queue name has 1 to 64 bytes" check (octet_length(name) between 1 and 64),
  constraint "there are three retention classes" check (retention in ('brief', 'default', 'long')),
  constraint "max_attempts goes from 1 to 32767" check (max_attempts between 1 and 32767)
);
