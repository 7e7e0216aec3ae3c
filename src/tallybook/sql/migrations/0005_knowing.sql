-- 0005: knowing: counters, history, queues as things, why and trace. Workers may run; the tables that get a trigger are locked for a moment.

-- Counters

-- History

-- Queues

alter table tallybook.queue add column max_attempts smallint, add column notify boolean not null default false,
  add column changed_at timestamptz, add column changed_by text,
  add constraint "max_attempts goes from 1 to 32767" check (max_attempts between 1 and 32767);
comment on column tallybook.queue.max_attempts is 'How many failures end a job of this queue where neither it nor its task says so; null: 5.';
comment on column tallybook.queue.notify is 'Whether its jobs'' transitions are published on the channel tallybook_jobs.';
comment on column tallybook.queue.retention is 'The class of the lanes that producers use from now on; a lane keeps the class of its birth.';
alter table tallybook.lane add column dropped pg_snapshot;
comment on column tallybook.lane.dropped is 'Its queue was dropped: what had committed by then does not count for whether there is such a queue.';
-- Of one queue, in the order of their time: who tops or truncates a queue reads nothing of others.
create index scheduled_of_lane on tallybook.scheduled (lane_id, run_at, job_id);
create index waiting_of_lane on tallybook.waiting (lane_id, job_id) where fair_key is null;
drop function if exists tallybook._take(int, "char", xid8, int, int, uuid, xid8, timestamptz);
drop function if exists tallybook.resume(text);

-- Why and trace
