-- queue_set(queue, retention, max_attempts, ...): create a queue or change its settings. A null leaves a setting
-- unchanged.
--
--   retention     brief, default or long: how long ended jobs are kept. A lane keeps its class: producers use new lanes
--                 of the new class from now on, and the old ones are drained. Scheduled and waiting jobs keep theirs.
--   max_attempts  the number of failures that makes a job dead if neither it nor its task sets one; 0: back to 5
--   notify        publish the transitions of its jobs on the channel tallybook_jobs (see _publish)
--   by            who makes the change
--   error_retention    how long the view error shows its failures, shorter or longer than the history of its jobs; 0:
--                      as long as the history
--   metrics_retention  how long its series is kept; after that, it is deleted instead of summed up to a longer step
--                      (see _thin); 0: as long as all series
--   own_names     its subjects have names of their own: another queue can have a subject of the same task and name. Can
--                 be changed only before the queue's first job or after a drop, because names keep their scope.
--   random_order  new jobs get a random place among the waiting jobs, through a random fair key (see fair_release).
--                 Jobs with an order key and subjects do not. Producers use new lanes, as for retention
-- Returns created, changed or unchanged. Clients are notified on the channel tallybook_queues. Limits of a queue are
-- the rules for the key queue:NAME (rate_limit_set, concurrency_limit_set, breaker_set). Errors: TB005 invalid value,
-- own_names of a queue that has had jobs; 55P03: notify needs a moment without open transactions that have enqueued:
-- try again. Reads queue, lane; writes queue, lane.
-- rights: operator
create or replace function tallybook.queue_set(queue text, retention text default null, max_attempts int default null,
  notify boolean default null, by text default session_user, at timestamptz default clock_timestamp(),
  error_retention interval default null, metrics_retention interval default null, own_names boolean default null,
  random_order boolean default null)
returns text language plpgsql as $$
declare v_done text; v_created boolean; n record;
begin
  perform tallybook._check_name('queue', queue, 64);
  perform tallybook._refuse(retention not in ('brief', 'default', 'long'),
            format('there is no retention class %s', to_json(retention)), 'Use brief, default or long.');
  perform tallybook._check_range('max_attempts', max_attempts::text, coalesce(max_attempts between 0 and 32767, true),
                                 'It must be from 1 to 32767; 0: the limit of the task, or 5.');
  perform tallybook._check_range(w.name, w.said::text,
            coalesce(w.said = '0' or w.said between '1 minute' and '100 years', true),
            'It must be from 1 minute to 100 years; 0: as long as other errors.')
    from (values ('error_retention', error_retention), ('metrics_retention', metrics_retention)) w(name, said);
  insert into tallybook.queue as q (name, created_at)
    values (queue_set.queue, queue_set.at) on conflict on constraint queue_pkey do nothing;
  v_created := found;
  select coalesce(queue_set.retention, q.retention) as retention, coalesce(queue_set.notify, q.notify) as notify,
         nullif(coalesce(queue_set.max_attempts, q.max_attempts), 0) as max_attempts,
         nullif(coalesce(queue_set.error_retention, q.error_retention), '0') as error_retention,
         nullif(coalesce(queue_set.metrics_retention, q.metrics_retention), '0') as metrics_retention,
         coalesce(queue_set.own_names, q.own_names) as own_names, queue_set.own_names <> q.own_names as renames,
         coalesce(queue_set.random_order, q.random_order) as random_order
    into n from tallybook.queue q where q.name = queue_set.queue for update;
  perform tallybook._refuse(n.renames and exists (select from tallybook._queue_used u where u.queue = queue_set.queue),
            format('queue %s has had jobs, so own_names cannot change', to_json(queue)),
            'Set it before the first job. An unused queue can be dropped first.');
  update tallybook.queue q
     set retention = n.retention, notify = n.notify, max_attempts = n.max_attempts,
         error_retention = n.error_retention, metrics_retention = n.metrics_retention,
         own_names = n.own_names, random_order = n.random_order, changed_at = queue_set.at, changed_by = queue_set.by
   where q.name = queue_set.queue
     and (v_created
          or (q.retention, q.notify, q.max_attempts, q.error_retention, q.metrics_retention, q.own_names,
              q.random_order) is distinct from (n.retention, n.notify, n.max_attempts, n.error_retention,
                                                n.metrics_retention, n.own_names, n.random_order));
  v_done := case when not found then 'unchanged' when v_created then 'created' else 'changed' end;
  perform tallybook._queue_lanes(queue);
  if notify is not null then perform tallybook._publishing(); end if;
  if v_done <> 'unchanged' then perform tallybook._queue_changed(queue, v_done, by); end if;
  return v_done;
end $$;

-- _queue_lanes(queue): give producers a new lane where the present one has another class or order than the queue. Of
-- twins they use the newest lane.
create or replace function tallybook._queue_lanes(p_queue text) returns void
language sql as $$
  insert into tallybook.lane (queue, priority, part, retention, shuffled)
  select n.queue, n.priority, n.part, k.class, k.shuffled
    from (select distinct on (l.priority, l.part) l.queue, l.priority, l.part, l.retention, l.shuffled
            from tallybook.lane l
           where l.queue = p_queue and l.retired_at is null and l.part not in ('turn', 'fair')
           order by l.priority, l.part, l.lane_id desc) n,
         (select coalesce(left(q.retention, 1), 'd')::"char", coalesce(q.random_order, false)
            from (select) one left join tallybook.queue q on q.name = p_queue) k(class, shuffled)
   where (n.retention, n.shuffled) <> (k.class, k.shuffled) order by n.priority, n.part
$$;
