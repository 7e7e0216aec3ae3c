-- queue_set(queue, retention, max_attempts, notify, by, at, error_retention, metrics_retention, own_names): make
-- a queue, or change its settings; null: left as it is.
--
--   retention     brief, default or long: how long ended jobs stay on view. A lane keeps the class of its birth:
--                 producers use new lanes
--                 of the new class from now on, and the old ones are drained. What is scheduled or waits stays in its
--                 class
--   max_attempts  how many failures end a job where neither it nor its task says so; 0: 5 again
--   notify        publish its jobs' transitions on the channel tallybook_jobs (see _publish)
--   by            who says so
--   error_retention    how long the view error shows its failures, shorter or longer than the history of its jobs; 0:
--                      as long as that again
--   metrics_retention  how long its series is kept: after this time it is dropped instead of summed up to a longer step
--                      (see _thin); 0: as long as all series again
--   own_names     its subjects have names of their own: of one task and name there may be one here and one elsewhere.
--                 Changed only before the queue's first job, or after a drop: names stay what they were made as
-- Returns created, changed or unchanged. Clients are told on the channel tallybook_queues. Limits of a queue are the
-- rules for the key queue:NAME (rate_limit_set, concurrency_limit_set, breaker_set).
-- Errors: TB005 what does not fit, own_names of a queue that has had jobs; 55P03: notify needs a moment in which no
-- transaction that has enqueued is open: try again.
-- Reads queue, lane; writes queue, lane.
-- rights: operator
create or replace function tallybook.queue_set(queue text, retention text default null, max_attempts int default null,
  notify boolean default null, by text default session_user, at timestamptz default clock_timestamp(),
  error_retention interval default null, metrics_retention interval default null, own_names boolean default null)
returns text language plpgsql as $$
declare
  v_done text; v_created boolean; n record;
begin
  perform tallybook._check_name('queue', queue, 64);
  perform tallybook._refuse(retention not in ('brief', 'default', 'long'),
            format('there is no retention class %s', to_json(retention)), 'They are brief, default, long.');
  perform tallybook._check_range('max_attempts', max_attempts::text, coalesce(max_attempts between 0 and 32767, true),
                                 'It goes from 1 to 32767; 0 is what tasks say, or 5.');
  perform tallybook._check_range(w.name, w.said::text,
            coalesce(w.said = '0' or w.said between '1 minute' and '100 years', true),
            'It goes from 1 minute to 100 years; 0 is as long as the others.')
    from (values ('error_retention', error_retention), ('metrics_retention', metrics_retention)) w(name, said);
  insert into tallybook.queue as q (name, created_at)
    values (queue_set.queue, queue_set.at) on conflict on constraint queue_pkey do nothing;
  v_created := found;
  select coalesce(queue_set.retention, q.retention) as retention, coalesce(queue_set.notify, q.notify) as notify,
         nullif(coalesce(queue_set.max_attempts, q.max_attempts), 0) as max_attempts,
         nullif(coalesce(queue_set.error_retention, q.error_retention), '0') as error_retention,
         nullif(coalesce(queue_set.metrics_retention, q.metrics_retention), '0') as metrics_retention,
         coalesce(queue_set.own_names, q.own_names) as own_names, queue_set.own_names <> q.own_names as renames
    into n from tallybook.queue q where q.name = queue_set.queue for update;
  perform tallybook._refuse(n.renames and exists (select from tallybook._queue_used u where u.queue = queue_set.queue),
            format('queue %s has had jobs: own_names stays as it is', to_json(queue)),
            'Set it before the first job, or for another queue; a queue that nobody needs can be dropped first.');
  update tallybook.queue q
     set retention = n.retention, notify = n.notify, max_attempts = n.max_attempts,
         error_retention = n.error_retention, metrics_retention = n.metrics_retention,
         own_names = n.own_names, changed_at = queue_set.at, changed_by = queue_set.by
   where q.name = queue_set.queue
     and (v_created
          or (q.retention, q.notify, q.max_attempts, q.error_retention, q.metrics_retention, q.own_names)
             is distinct from
             (n.retention, n.notify, n.max_attempts, n.error_retention, n.metrics_retention, n.own_names));
  v_done := case when not found then 'unchanged' when v_created then 'created' else 'changed' end;
  perform tallybook._queue_lanes(queue);
  if notify is not null then perform tallybook._publishing(); end if;
  if v_done <> 'unchanged' then perform tallybook._queue_said(queue, v_done, by); end if;
  return v_done;
end $$;

-- _queue_lanes(queue): where producers would use a lane of another class than the queue's, they get a new one: of twins
-- they use the newest.
create or replace function tallybook._queue_lanes(p_queue text) returns void
language sql as $$
  insert into tallybook.lane (queue, priority, part, retention)
  select n.queue, n.priority, n.part, k.class
    from (select distinct on (l.priority, l.part) l.queue, l.priority, l.part, l.retention from tallybook.lane l
           where l.queue = p_queue and l.retired_at is null and l.part not in ('turn', 'fair')
           order by l.priority, l.part, l.lane_id desc) n,
         (select coalesce((select left(q.retention, 1) from tallybook.queue q where q.name = p_queue),
                          'd')::"char") k(class)
   where n.retention <> k.class order by n.priority, n.part
$$;
