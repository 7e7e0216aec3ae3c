-- LEDGER. Unique (entry_xid, entry_seq), made below on each class, is the lock of an attempt's end: the first
-- insert ends it, at any isolation level. Its claim has the worker and the start, its entry the rest.
--> LEDGER: one row is how one attempt ended. It lies, and leaves, with its entry.
create table tallybook.outcome (
  entry_xid xid8 not null,
  entry_seq bigint not null,
  ended_at  timestamptz not null,
  state     tallybook.ending not null,
  retention "char" not null,
  --> Only for what did not complete: lists of those find their jobs by it.
  job_id    bigint,
  error     jsonb,
  --> What the handler returned, where it returned anything.
  result    jsonb,
  constraint "what did not complete names its job" check (state = 'completed' or job_id is not null)
) partition by list (retention);
create index outcome_not_completed on tallybook.outcome (state, ended_at) where state <> 'completed';
alter table tallybook.outcome replica identity full;
