create table tallybook.queue (
  name         text primary key,
  retention    text not null default 'default',
  paused_at    timestamptz,
  paused_by    text,
  created_at   timestamptz not null default clock_timestamp(),
  max_attempts smallint,
  notify       boolean not null default false,
  changed_at   timestamptz,
  changed_by   text,
  constraint "a queue name has 1 to 64 bytes" check (octet_length(name) between 1 and 64),
  constraint "there are three retention classes" check (retention in ('brief', 'default', 'long')),
  constraint "max_attempts goes from 1 to 32767" check (max_attempts between 1 and 32767)
);
comment on table tallybook.queue is
  'Settings of a queue. Producers never write here: a queue that has no row has the defaults.';
comment on column tallybook.queue.retention is
  'The class of the lanes that producers use from now on; a lane keeps the class of its birth.';
comment on column tallybook.queue.max_attempts is
  'How many failures end a job of this queue if neither it nor its task has a limit; null: 5.';
comment on column tallybook.queue.notify is
  'Whether its jobs'' transitions are published on the channel tallybook_jobs.';
