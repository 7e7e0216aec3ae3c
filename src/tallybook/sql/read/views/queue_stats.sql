-- queue_stats: the counters for people, per queue. They cost the same at any size: see counts.
--
--   oldest     since when the next job of the queue's lines could run. It is looked for at the head of each line only
--   unserved   those in line whose task, or its version, no living worker knows; such have lines of their own
-- rights: operator, reader, metrics
create or replace view tallybook.queue_stats as
select c.queue, c.scheduled, c.retrying, c.waiting, c.available, c.running, c.dead, c.completed, c.failed, c.cancelled,
       c.unserved, case when c.available > 0 then tallybook._oldest(c.queue) end as oldest, c.paused_at, c.paused_by
  from (select q.name as queue, q.paused_at, q.paused_by,
               coalesce(sum(n.n) filter (where n.what = 'scheduled'), 0)::bigint as scheduled,
               coalesce(sum(n.n) filter (where n.what = 'retrying'), 0)::bigint as retrying,
               coalesce(sum(n.n) filter (where n.what = 'waiting'), 0)::bigint as waiting,
               coalesce(sum(n.n) filter (where n.what = 'available'), 0)::bigint as available,
               coalesce(sum(n.n) filter (where n.what = 'running'), 0)::bigint as running,
               coalesce(sum(n.n) filter (where n.what = 'dead'), 0)::bigint as dead,
               coalesce(sum(n.n) filter (where n.what = 'completed'), 0)::bigint as completed,
               coalesce(sum(n.n) filter (where n.what = 'failed'), 0)::bigint as failed,
               coalesce(sum(n.n) filter (where n.what = 'cancelled'), 0)::bigint as cancelled,
               coalesce(sum(n.n) filter (
                 where n.what = 'available' and l.part not in ('', 'turn', 'fair') and not exists (
                   select from tallybook.worker k
                    where k.ended_at is null and l.part = any (k.parts) and l.queue = any (k.queues))), 0)::bigint
                 as unserved
          from tallybook.queues q
          left join (tallybook._counted() n join tallybook.lane l on l.lane_id = n.lane_id) on l.queue = q.name
         group by q.name, q.paused_at, q.paused_by) c;
comment on view tallybook.queue_stats is
  'Per queue: how many jobs are in which state, how many have ended how, since when the oldest in line could run.';
