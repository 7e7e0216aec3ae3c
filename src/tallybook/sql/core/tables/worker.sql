create table tallybook.worker (
  id         int generated always as identity primary key,
  name       text not null,
  queues     text[] not null,
  tasks      text[] not null,
  parts      text[] not null,
  session    boolean not null,
  lease      interval not null default '30 s',
  open_from  bigint not null default 0,
  started_at timestamptz not null,
  seen_at    timestamptz not null,
  gone_at    timestamptz,
  ended_at   timestamptz,
  slots      int[],
  version    text,
  lag        interval,
  memory     bigint,
  constraint "a lease has at most 100 years" check (lease between interval '0' and interval '100 years')
) with (fillfactor = 50);
create index worker_live on tallybook.worker (id) where ended_at is null;
comment on column tallybook.worker.session is
  'It holds an advisory lock on its heartbeat''s connection, so that its death is seen at once.';
comment on column tallybook.worker.lease is 'How long it may be silent: its own word, whatever the lease of who looks.';
comment on column tallybook.worker.open_from is 'No claim of it with a lower id is open: where rescue starts to look.';
comment on column tallybook.worker.gone_at is 'When its session was first seen to be gone.';
comment on column tallybook.worker.slots is 'How many jobs of each of its queues run at once, in the order of queues.';
comment on column tallybook.worker.version is 'Of the package it runs.';
comment on column tallybook.worker.lag is
  'The longest that its event loop let a sign wait between its last two heartbeats.';
comment on column tallybook.worker.memory is 'Bytes of its process that were in memory at its last heartbeat.';
