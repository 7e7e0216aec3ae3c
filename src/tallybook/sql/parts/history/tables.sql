-- The numbers that prune has removed from the ledgers, so that a recount can still be compared with the totals.
--> One row per dropped range of the ledgers: the number of attempts, and of each end.
create table tallybook.pruned (
  pruned_at timestamptz not null,
  retention "char" not null,
  lower     xid8,
  upper     xid8,
  entries   bigint not null,
  ended     jsonb not null
);
alter table tallybook.pruned replica identity full;

--> Retention periods. For people: the view retentions and the verb retention_set.
create table tallybook.retention_class (
  name text primary key,
  --> The letter of the class in the ledgers; null: rows are deleted in small batches.
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
  ('fires', null, '90 days', 'what became of the ticks of schedules'),
  ('audit', null, '90 days', 'what people have changed, and who');

-- What prune knows about a range of transaction ids whose transactions have all ended: it is
-- counted piece by piece, and the counts do not change any more.
create table tallybook.history_range (
  leaf        name primary key,
  --> The database and the files that were counted: after a restore, or a rewrite of a table, counting starts anew.
  files       oid[] not null,
  --> When prune first found that no transaction can write to it any more.
  quiet_since timestamptz,
  --> How many blocks of the entries were counted; outcomes_to: of the outcomes.
  entries_to  bigint not null default 0,
  entries     bigint not null default 0,
  outcomes_to bigint not null default 0,
  outcomes    bigint not null default 0,
  states      jsonb not null default '{}',
  newest_end  timestamptz,
  open        bigint,
  --> Each entry has its outcome: nothing in it is open, for ever.
  complete    boolean not null default false,
  again_at    timestamptz,
  --> By worker: all of its claims in the range up to this one have ended.
  checked     jsonb not null default '{}',
  --> Why it was not dropped when that was tried last. For people there is held_ranges().
  held        text,
  --> When prune first found something in it: an eighth of the retention later it is cut.
  begun_at    timestamptz not null default clock_timestamp()
);

--> Where the next sweep of a small table continues.
create table tallybook.sweep (
  kind  text primary key,
  place jsonb not null
);

insert into tallybook.service (name, every) values ('prune', '1 min');

--> Failures of dropped ranges, of queues with a longer error_retention. For people: the view error.
create table tallybook.error_kept (
  ended_at timestamptz not null,
  state    tallybook.ending not null,
  queue    text not null,
  task     text not null,
  subject  text,
  job_id   bigint not null,
  attempt  int not null,
  error    jsonb
);
create index error_kept_of_queue on tallybook.error_kept (queue, ended_at);
create index error_kept_newest on tallybook.error_kept (ended_at);
alter table tallybook.error_kept replica identity full;
