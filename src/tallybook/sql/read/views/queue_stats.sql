-- queue_stats: the counters of each queue. Their cost does not depend on the number of jobs: see counts.
--
--   oldest     since when the queue's next available job could run; only the first job of each lane is checked
--   unserved   available jobs whose task or version no live worker knows; they have lanes of their own
--> Per queue: jobs by state, ends by kind, and since when the oldest available job could run.
-- rights: operator, reader, metrics
create or replace view tallybook.queue_stats as
select q.name as queue,
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
            where k.ended_at is null and l.part = any (k.parts) and l.queue = any (k.queues))), 0)::bigint as unserved,
       case when sum(n.n) filter (where n.what = 'available') > 0 then tallybook._oldest(q.name) end as oldest,
       q.paused_at, q.paused_by
  from tallybook.queues q
  left join (tallybook._counted_of(null) n join tallybook.lane l on l.lane_id = n.lane_id) on l.queue = q.name
 group by q.name, q.paused_at, q.paused_by;
