-- queue_stats, queue_status: the counters for people, per queue, and per queue, task and state. They cost the same at any size: see counts.
--
-- oldest: since when the next job of the queue's lines could run. It is looked for at the head of each line only.
create or replace view tallybook.queue_stats as
select q.name as queue, coalesce(c.scheduled, 0) as scheduled, coalesce(c.retrying, 0) as retrying, coalesce(c.waiting, 0) as waiting,
       coalesce(c.available, 0) as available, coalesce(c.running, 0) as running, coalesce(c.dead, 0) as dead, coalesce(c.completed, 0) as completed,
       coalesce(c.failed, 0) as failed, coalesce(c.cancelled, 0) as cancelled,
       case when c.available > 0 then tallybook._oldest(q.name) end as oldest, q.paused_at, q.paused_by
  from tallybook.queues q
  left join (select n.queue, sum(n.scheduled)::bigint as scheduled, sum(n.retrying)::bigint as retrying, sum(n.waiting)::bigint as waiting,
                    sum(n.available)::bigint as available, sum(n.running)::bigint as running, sum(n.dead)::bigint as dead,
                    sum(n.completed)::bigint as completed, sum(n.failed)::bigint as failed, sum(n.cancelled)::bigint as cancelled
               from tallybook.counts() n group by n.queue) c on c.queue = q.name;
comment on view tallybook.queue_stats is 'Per queue: how many jobs are in which state, how many have ended how, since when the oldest in line could run.';

-- oldest, newest: when the oldest and the newest job in this state was enqueued; of what has ended when the last one did. Looked for among the
-- 1,000 first and last of all jobs in scheduled, waiting and dead, and of each line: null where none of these is of the task.
-- attempts: how often a job in this state has been put in line, on average; one that has not started yet counts without the attempt that it waits for.
create or replace view tallybook.queue_status as
select l.queue, c.task, c.what as state, sum(c.n)::bigint as jobs, min(e.oldest) as oldest,
       case when c.what in ('completed', 'cancelled') then max(c.last_at) else max(e.newest) end as newest,
       round(sum(c.attempts) / sum(c.n) - (c.what in ('scheduled', 'retrying', 'waiting', 'available'))::int, 2) as average_attempts
  from tallybook._counted() c
  join tallybook.lane l on l.lane_id = c.lane_id
  left join tallybook._edges() e on e.lane_id = c.lane_id and e.task = c.task and e.state = c.what
 where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead', 'completed', 'cancelled')
 group by l.queue, c.task, c.what having sum(c.n) <> 0;
comment on view tallybook.queue_status is 'Per queue, task and state: how many jobs, the oldest, the newest, how many attempts on average.';
