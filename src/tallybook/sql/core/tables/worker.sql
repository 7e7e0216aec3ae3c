create table tallybook.worker (
  id         int generated always as identity primary key,
  name       text not null,
  queues     text[] not null,
  tasks      text[] not null,
  parts      text[] not null,
  --> It holds an advisory lock on its heartbeat's connection, so that its death is seen at once.
  session    boolean not null,
  --> How long it may be silent: its own word, whatever the lease of who looks.
  lease      interval not null default '30 s',
  --> No claim of it with a lower id is open: where rescue starts to look.
  open_from  bigint not null default 0,
  started_at timestamptz not null,
  seen_at    timestamptz not null,
  --> When its session was first seen to be gone.
  gone_at    timestamptz,
  ended_at   timestamptz,
  --> How many jobs of each of its queues run at once, in the order of queues.
  slots      int[],
  --> Of the package it runs.
  version    text,
  --> The longest that its event loop let a sign wait between its last two heartbeats.
  lag        interval,
  --> Bytes of its process that were in memory at its last heartbeat.
  memory     bigint,
  constraint "a lease has at most 100 years" check (lease between interval '0' and interval '100 years')
) with (fillfactor = 50);
create index worker_live on tallybook.worker (id) where ended_at is null;
