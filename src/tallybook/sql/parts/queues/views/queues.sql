-- queues: all queues that have settings or have had a job.
--> All queues that have settings or have had a job.
-- rights: worker, operator, reader
create or replace view tallybook.queues as
select n.name, q.retention, q.paused_at, q.paused_by, q.created_at, q.max_attempts, q.notify, q.changed_at,
       q.changed_by, q.error_retention, q.metrics_retention, q.own_names, q.random_order
  from (select q.name from tallybook.queue q
        union
        select u.queue from tallybook._queue_used u) n
  left join tallybook.queue q on q.name = n.name;
