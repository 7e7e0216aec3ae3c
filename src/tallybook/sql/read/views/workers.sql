-- workers: all recorded workers; ended_at is null for live ones.
--> All recorded workers; ended_at is null for live ones.
-- rights: operator, reader
create or replace view tallybook.workers as
select w.id, w.name, w.queues, w.tasks, w.lease, w.started_at, w.seen_at, w.gone_at, w.ended_at,
       w.slots, w.version, w.lag, w.memory from tallybook.worker w;
