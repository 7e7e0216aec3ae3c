-- queue_set(queue, retention, max_attempts, notify, by, at): make a queue, or change its settings; null: left as it is.
--
--   retention     brief, default or long: how long ended jobs stay on view. A lane keeps the class of its birth:
--                 producers use new lanes
--                 of the new class from now on, and the old ones are drained. What is scheduled or waits stays in its
--                 class
--   max_attempts  how many failures end a job where neither it nor its task says so; 0: 5 again
--   notify        publish its jobs' transitions on the channel tallybook_jobs (see _publish)
--   by            who says so
-- Returns created, changed or unchanged. Clients are told on the channel tallybook_queues. Limits of a queue are the
-- rules for the key queue:NAME (rate_limit_set, concurrency_limit_set, breaker_set).
-- Errors: TB005 what does not fit; 55P03: notify needs a moment in which no transaction that has enqueued is open: try
-- again.
-- Reads queue, lane; writes queue, lane.
-- rights: operator
create or replace function tallybook.queue_set(queue text, retention text default null, max_attempts int default null,
  notify boolean default null, by text default session_user, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  v_said text := 'changed'; v_was tallybook.queue;
begin
  perform tallybook._check_name('queue', queue, 64);
  if retention not in ('brief', 'default', 'long') then
    raise exception 'there is no retention class %', to_json(retention) using errcode = 'TB005',
      hint = 'They are brief, default, long.';
  end if;
  if max_attempts not between 0 and 32767 then
    raise exception 'max_attempts % is out of range', max_attempts
      using errcode = 'TB005', hint = 'It goes from 1 to 32767; 0 is what tasks say, or 5.';
  end if;
  insert into tallybook.queue as q (name, created_at)
    values (queue_set.queue, queue_set.at) on conflict on constraint queue_pkey do nothing;
  if found then v_said := 'created'; end if;
  select q.* into v_was from tallybook.queue q where q.name = queue_set.queue for update;
  update tallybook.queue q
     set retention = coalesce(queue_set.retention, q.retention), notify = coalesce(queue_set.notify, q.notify),
         max_attempts = case when queue_set.max_attempts is null then q.max_attempts
         else nullif(queue_set.max_attempts, 0) end,
         changed_at = queue_set.at, changed_by = queue_set.by
   where q.name = queue_set.queue
     and (v_said = 'created' or (q.retention, q.notify, q.max_attempts) is distinct from (
            coalesce(queue_set.retention, q.retention), coalesce(queue_set.notify, q.notify),
            case when queue_set.max_attempts is null then q.max_attempts else nullif(queue_set.max_attempts, 0) end));
  if not found then v_said := 'unchanged'; end if;
  perform tallybook._queue_lanes(queue);
  if notify is not null then perform tallybook._publishing(); end if;
  if v_said <> 'unchanged' then perform tallybook._queue_said(queue, v_said, by); end if;
  return v_said;
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
