-- 0001: the ledgers and the small tables around them. Takes no lock on anything of yours; no worker can run before it.
--
-- Tables and types only. Functions and views are re-applied from their own files after the last migration.

create schema tallybook;
comment on schema tallybook is 'Tallybook, a job queue: start with "select * from tallybook.job"';

-- How one attempt ended. completed, cancelled and dead are final for the job; after the others it goes on elsewhere.
create type tallybook.ending as enum ('completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'dead');

-- Job ids and the numbers that order what is put back in line come from one sequence: 43 bits, below the node's 10 bits.
create sequence tallybook.job_id as bigint;
create sequence tallybook.claim_id as bigint;

create table tallybook.installation (
  one               boolean primary key default true check (one),
  version           int not null,
  functions         text not null,
  node              int not null,
  system_identifier bigint not null,
  installed_at      timestamptz not null default clock_timestamp(),
  migrated_at       timestamptz not null default clock_timestamp(),
  constraint "the node number has 10 bits" check (node between 0 and 1023)
);
comment on table tallybook.installation is 'One row: what is installed here, and in which cluster its transaction ids mean something.';

create table tallybook.queue (
  name       text primary key,
  retention  text not null default 'default',
  paused_at  timestamptz,
  paused_by  text,
  created_at timestamptz not null default clock_timestamp(),
  constraint "a queue name has 1 to 64 bytes" check (octet_length(name) between 1 and 64),
  constraint "there are three retention classes" check (retention in ('brief', 'default', 'long'))
);
comment on table tallybook.queue is 'Settings of a queue. Producers never write here: a queue that has no row has the defaults.';
comment on column tallybook.queue.retention is 'How long ended jobs stay on view: an installation sets the times (brief 1 hour, default 7 days, long 90 days).';

-- Not unique on purpose: a second producer of a brand-new lane must not wait for the first one's commit, so who sees
-- none makes its own. Twins are harmless: later producers take the lowest id, a claim walks them all.
create table tallybook.lane (
  lane_id    int generated always as identity primary key,
  queue      text not null,
  priority   smallint not null,
  part       text not null default '',
  retention  "char" not null,
  born       xid8 not null default pg_snapshot_xmin(pg_current_snapshot()),
  retired_at timestamptz,
  constraint "a queue name has 1 to 64 bytes" check (octet_length(queue) between 1 and 64)
);
create index lane_of_queue on tallybook.lane (queue, priority, part, lane_id) include (retention) where retired_at is null;
comment on column tallybook.lane.retention is 'b, d or l: brief, default or long. The ledgers are partitioned by it.';
comment on column tallybook.lane.part is 'Empty, or ''task:NAME'' for jobs whose task the workers that met them did not know.';
comment on column tallybook.lane.born is 'No entry of this lane can have a lower transaction id: where its first window opens.';

-- LEDGER. Columns from wide to narrow: nothing is lost to padding.
create table tallybook.entry (
  xid          xid8 not null default pg_current_xact_id(),
  seq          bigint not null,
  job_id       bigint not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  max_attempts smallint,
  retention    "char" not null,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  run_at       timestamptz,
  errors       jsonb,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
) partition by list (retention);
-- Full pages: these grow at their end only.
create index entry_line on tallybook.entry (lane_id, xid, seq) with (fillfactor = 100);
create index entry_job on tallybook.entry (job_id) with (fillfactor = 100);
comment on table tallybook.entry is 'LEDGER: one row is one attempt that may run now. Its line is its lane, in the order (xid, seq).';
comment on column tallybook.entry.xid is 'The transaction that wrote the entry: the cursor moves from snapshot to snapshot over it.';
comment on column tallybook.entry.seq is 'Order within one transaction; the job''s own id at first, a fresh number when it is put back.';
comment on column tallybook.entry.max_attempts is 'How many failures end the job; null: what its task says, or 5.';
comment on column tallybook.entry.errors is 'What the earlier attempts failed with, oldest first; null on the way of a job that never failed.';

-- LEDGER. A claim is an interval of its lane's line, so it has one size whatever it takes, and rows are found again by it.
create table tallybook.claim (
  xid        xid8 not null default pg_current_xact_id(),
  id         bigint not null,
  number     bigint not null,
  lo         xid8 not null,
  hi         xid8 not null,
  from_xid   xid8 not null,
  from_seq   bigint not null,
  pos_xid    xid8 not null,
  pos_seq    bigint not null,
  one_xid    xid8,
  one_seq    bigint,
  claimed    bigint not null,
  claimed_at timestamptz not null,
  lease      uuid,
  lane_id    int not null,
  worker_id  int,
  jobs       int not null,
  retention  "char" not null,
  holes      xid8[] not null,
  closed     xid8[] not null,
  skipped    bigint[] not null default '{}'
) partition by list (retention);
create index claim_head on tallybook.claim (lane_id, number desc);
create index claim_lease on tallybook.claim (lease);
create index claim_worker on tallybook.claim (worker_id, id);
-- Which claim took an entry: each claim is in one of the three (see _claim_of).
create index claim_by_window on tallybook.claim (lane_id, pos_xid, pos_seq) where one_xid is null and closed = '{}';
create index claim_by_holes on tallybook.claim (lane_id, pos_xid, pos_seq) where one_xid is null and closed <> '{}';
create index claim_by_one on tallybook.claim (one_xid, one_seq) where one_xid is not null;
comment on table tallybook.claim is 'LEDGER: one row is one batch taken by one worker, and its lane''s cursor after it.';
comment on column tallybook.claim.lo is 'The window of transaction ids that is being drained: lo <= xid < hi.';
comment on column tallybook.claim.holes is 'Transactions that were running when the window was opened: not taken with it.';
comment on column tallybook.claim.closed is 'Former holes that have ended since and are drained before the window; empty: the window is drained.';
comment on column tallybook.claim.from_xid is 'This claim took what lies after (from_xid, from_seq) up to (pos_xid, pos_seq).';
comment on column tallybook.claim.one_xid is 'With one_seq: the only entry that this claim took, by its job''s id; the cursor is as it was.';
comment on column tallybook.claim.skipped is 'Entries (by seq) in the interval that were not taken: cancelled, or taken by id before.';
comment on column tallybook.claim.claimed is 'How many jobs this lane has handed out, this claim included.';

-- LEDGER. Unique (entry_xid, entry_seq), made below on each class, is the lock of an attempt's end: who inserts first has
-- ended it, at whatever isolation level. Who ran it and since when stands in its claim, the rest in its entry.
create table tallybook.outcome (
  entry_xid  xid8 not null,
  entry_seq  bigint not null,
  ended_at   timestamptz not null,
  state      tallybook.ending not null,
  retention  "char" not null,
  job_id     bigint,
  error      jsonb,
  constraint "what did not complete names its job" check (state = 'completed' or job_id is not null)
) partition by list (retention);
create index outcome_not_completed on tallybook.outcome (state, ended_at) where state <> 'completed';
comment on column tallybook.outcome.job_id is 'Only for what did not complete: lists of those find their jobs by it.';
comment on table tallybook.outcome is 'LEDGER: one row is how one attempt ended. It lies, and leaves, with its entry.';

create table tallybook.scheduled (
  job_id       bigint primary key,
  run_at       timestamptz not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  max_attempts smallint,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  errors       jsonb,
  constraint "args are one object" check (jsonb_typeof(args) = 'object')
);
create index scheduled_due on tallybook.scheduled (run_at);
comment on table tallybook.scheduled is 'A job that may not run yet: delayed, in backoff after a failure, or snoozed.';

create table tallybook.dead (
  job_id       bigint primary key,
  died_at      timestamptz not null,
  enqueued_at  timestamptz not null,
  lane_id      int not null,
  attempt      int not null,
  failures     smallint not null,
  crashes      smallint not null,
  max_attempts smallint,
  reason       text not null,
  task         text not null,
  args         jsonb not null,
  headers      jsonb,
  unique_key   text,
  errors       jsonb,
  constraint "a dead letter has a reason" check (reason in ('failed', 'crashed', 'expired', 'killed'))
);
create index dead_newest on tallybook.dead (died_at);
comment on table tallybook.dead is 'A dead letter: a job out of attempts, kept for people, with its error history.';

create table tallybook.tombstone (
  job_id     bigint not null,
  attempt    int not null,
  cancelled  boolean not null default false,
  taken      boolean not null default false,
  once       boolean not null default false,
  reason     text,
  xid        xid8 not null default pg_current_xact_id(),
  created_at timestamptz not null default clock_timestamp(),
  primary key (job_id, attempt),
  constraint "a tombstone says why" check (cancelled or taken)
);
comment on column tallybook.tombstone.once is 'The cancel was for this attempt alone: a person has given the job another one since.';
comment on table tallybook.tombstone is 'An attempt that no claim may take from the line: cancelled (and all later ones with it), or taken by id.';

-- A small ledger: the newest row of a key says which job has it, and the key is free once that job has ended. No row is
-- deleted when a key is freed, so that a key that is used ten thousand times under a pinned horizon stays as fast.
create table tallybook.unique_key (
  task       text not null,
  key        text not null,
  generation bigint not null,
  job_id     bigint not null,
  primary key (task, key, generation),
  constraint "a unique key has 1 to 512 bytes" check (octet_length(key) between 1 and 512)
);

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
  ended_at   timestamptz
) with (fillfactor = 50);
create index worker_live on tallybook.worker (id) where ended_at is null;
comment on column tallybook.worker.session is 'It holds an advisory lock on its heartbeat''s connection, so that its death is seen at once.';
comment on column tallybook.worker.lease is 'How long it may be silent: its own word, whatever the lease of who looks.';
comment on column tallybook.worker.open_from is 'No claim of it with a lower id is open: where rescue starts to look.';
comment on column tallybook.worker.gone_at is 'When its session was first seen to be gone.';

-- Partitions: by retention class, then by range of transaction ids, so that what is over goes whole. There is always a
-- last range up to MAXVALUE: a producer never meets a missing partition. Upkeep splits the last range while it is empty.
do $$
declare
  v_table text; v_class text; v_next text := (pg_snapshot_xmax(pg_current_snapshot())::text::bigint + 20000000)::text;
begin
  foreach v_table in array array['entry', 'claim', 'outcome'] loop
    foreach v_class in array array['brief', 'default', 'long'] loop
      execute format('create table tallybook.%I partition of tallybook.%I for values in (%L) partition by range (%I)',
        v_table || '_' || v_class, v_table, left(v_class, 1), case v_table when 'outcome' then 'entry_xid' else 'xid' end);
      if v_table = 'outcome' then  -- on the class, not on the root, whose key would have to carry the class in each entry
        execute format('create unique index %I on tallybook.%I (entry_xid, entry_seq) with (fillfactor = 100)',
          'an attempt of ' || v_class || ' ends once', v_table || '_' || v_class);
      end if;
      execute format('create table tallybook.%I partition of tallybook.%I for values from (minvalue) to (%L)',
        v_table || '_' || v_class || '_1', v_table || '_' || v_class, v_next);
      execute format('create table tallybook.%I partition of tallybook.%I for values from (%L) to (maxvalue)',
        v_table || '_' || v_class || '_2', v_table || '_' || v_class, v_next);
    end loop;
  end loop;
end $$;
