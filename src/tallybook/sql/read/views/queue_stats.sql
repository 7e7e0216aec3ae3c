-- queue_stats: the counters for people, per queue. They cost the same at any size: see counts.
--
--   oldest     since when the next job of the queue's lines could run. It is looked for at the head of each line only
--   unserved   those in line whose task, or its version, no living worker knows; such have lines of their own
-- rights: operator, reader, metrics
create or replace view tallybook.queue_stats as
select q.name as queue, coalesce(c.scheduled, 0) as scheduled, coalesce(c.retrying, 0) as retrying,
       coalesce(c.waiting, 0) as waiting, coalesce(c.available, 0) as available, coalesce(c.running, 0) as running,
       coalesce(c.dead, 0) as dead, coalesce(c.completed, 0) as completed, coalesce(c.failed, 0) as failed,
       coalesce(c.cancelled, 0) as cancelled, coalesce(c.unserved, 0) as unserved,
       case when c.available > 0 then tallybook._oldest(q.name) end as oldest, q.paused_at, q.paused_by
  from tallybook.queues q
  left join (select l.queue, sum(n.n) filter (where n.what = 'scheduled')::bigint as scheduled,
             sum(n.n) filter (where n.what = 'retrying')::bigint as retrying,
                    sum(n.n) filter (where n.what = 'waiting')::bigint as waiting,
                    sum(n.n) filter (where n.what = 'available')::bigint as available,
                    sum(n.n) filter (where n.what = 'running')::bigint as running,
                    sum(n.n) filter (where n.what = 'dead')::bigint as dead,
                    sum(n.n) filter (where n.what = 'completed')::bigint as completed,
                    sum(n.n) filter (where n.what = 'failed')::bigint as failed,
                    sum(n.n) filter (where n.what = 'cancelled')::bigint as cancelled,
                    sum(n.n) filter (where n.what = 'available' and l.part not in ('', 'turn', 'fair') and not exists (
                      select from tallybook.worker k
                       where k.ended_at is null and l.part = any (k.parts)
                             and l.queue = any (k.queues)))::bigint as unserved
               from tallybook._counted() n join tallybook.lane l on l.lane_id = n.lane_id
                    group by l.queue) c on c.queue = q.name;
comment on view tallybook.queue_stats is
  'Per queue: how many jobs are in which state, how many have ended how, since when the oldest in line could run.';
