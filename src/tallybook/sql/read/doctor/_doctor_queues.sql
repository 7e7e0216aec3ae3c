-- _doctor_queues(at): available jobs without a worker, paused queues, backlogs, dead letters, open breakers.
--
-- Looks for the next job of each lane, as a claim does, at most 10,000 lanes; the counters count the jobs behind it.
-- profile: hot
-- rights: operator
create or replace function tallybook._doctor_queues(p_at timestamptz) returns setof tallybook._check
language plpgsql stable
set enable_nestloop = on  -- also if the caller has switched it off
as $$
declare
  v_dead bigint; v_last_hour bigint;
  v_foreign boolean := tallybook._is_foreign_cluster(true);  -- then no cursor is valid: see cluster
begin
  return query
  with l as materialized (
    select n.queue, n.part, n.oldest, tallybook._ago(p_at - n.oldest) as ago, q.paused_at is not null as paused,
           exists (select from tallybook.worker w
                    where w.ended_at is null and w.seen_at >= p_at - w.lease and n.queue = any (w.queues)
                      and (n.part = '' or n.part = any (w.parts))) as served
      from (select x.queue, x.part, min(e.since) as oldest
              from (select * from tallybook.lane k where k.retired_at is null and not v_foreign
                     order by k.lane_id limit 10000) x
              cross join lateral (select tallybook._next(x.lane_id, x.retention, x.born) as xid) n
              left join lateral (select greatest(y.run_at, y.enqueued_at) as since from tallybook.entry y
                                  where y.lane_id = x.lane_id and y.retention = x.retention and y.xid = n.xid
                                        order by y.seq desc limit 1) e on true
             where n.xid is not null group by x.queue, x.part) n
      left join tallybook.queue q on q.name = n.queue
  ), found(name, items) as (
    select x.name, jsonb_agg(jsonb_build_object('level', x.level, 'text', x.text) || to_jsonb(l)
                             order by l.oldest, l.queue, l.part)
      from l, lateral (select l.part not in ('', 'turn', 'fair')) a(side), lateral (values
        ('unserved_queues', 'warning', not a.side and not l.served and not l.paused,
         format('queue %s has had available jobs for %s, and no live worker serves it', to_json(l.queue), l.ago)),
        ('unserved_tasks', 'warning', a.side and not l.served,
         format('queue %s has had available jobs of %s for %s, and no live worker can run them', to_json(l.queue),
                case when l.part like 'version:%' then format('task %s in version %s',
                  to_json(split_part(l.part, ':', 3)), split_part(l.part, ':', 2))
                     else 'task ' || to_json(substr(l.part, 6)) end, l.ago)),
        ('backlog', case when l.oldest < p_at - interval '1 hour' then 'warning' else 'note' end,
         l.served and not l.paused and l.oldest < p_at - interval '10 min',
         format('the next job of queue %s has waited for %s', to_json(l.queue), l.ago))) x(name, level, holds, text)
     where x.holds group by x.name
    union all
    select 'paused', jsonb_agg(jsonb_build_object('level', case when k.oldest < p_at - interval '1 hour' then 'warning'
                                                           else 'note' end, 'queue', q.name,
                         'paused_at', q.paused_at, 'paused_by', q.paused_by, 'oldest', k.oldest,
                         'text', format('queue %s has been paused for %s by %s, %s', to_json(q.name),
                                        tallybook._ago(p_at - q.paused_at), q.paused_by,
                                        coalesce('and its next job has waited for ' || tallybook._ago(p_at - k.oldest),
                                                 'and has no available jobs'))) order by k.oldest nulls last, q.name)
      from tallybook.queue q left join lateral (select min(l.oldest) as oldest from l where l.queue = q.name) k on true
     where q.paused_at is not null
  )
  select f.* from (values
    ('unserved_queues', 'every queue with available jobs is served',
     'Start a worker for the queue with `tallybook worker --queues`, or correct the queue name in the code that '
     'enqueues.'),
    ('unserved_tasks', 'live workers can run the tasks of all available jobs',
     'Start a worker whose code knows the task and the version, give a renamed task its old name as an alias, or '
     'cancel these jobs.'),
    ('paused', 'no queue is paused', 'When the reason for the pause has gone, run `tallybook queue resume`.'),
    ('backlog', 'no job has waited for longer than 10 min in a queue with workers',
     'Jobs arrive faster than workers run them. Add slots or workers, or find slow tasks with `tallybook top`. Jobs '
     'with a lower priority wait for the jobs before them.')) c(name, fine, advice),
    lateral tallybook._finding(c.name, (select d.items from found d where d.name = c.name), c.fine, c.advice) f;

  select count(*), count(*) filter (where d.died_at > p_at - interval '1 hour') into v_dead, v_last_hour
    from (select x.died_at from tallybook.dead x where x.died_at > p_at - interval '1 day' order by x.died_at desc
          limit 1000) d;
  return query select * from tallybook._finding('dead_letters', (
      select jsonb_agg(jsonb_build_object('level', case when v_last_hour >= 10 then 'warning'
                                          else 'note' end, 'task', d.task, 'jobs', d.n, 'newest', d.newest,
                         'text', format('%s of task %s (%s), the newest %s ago', d.n, to_json(d.task), d.reasons,
                                        tallybook._ago(p_at - d.newest))) order by d.n desc, d.task)
        from (select x.task, count(*) as n, max(x.died_at) as newest, string_agg(distinct x.reason, ', ') as reasons
                from (select k.task, k.died_at, k.reason from tallybook.dead k where k.died_at > p_at - interval '1 day'
                      order by k.died_at desc limit 1000) x
               group by x.task) d),
    'no job has died since yesterday',
    'Find the cause with `tallybook dead list`, fix it, then run `tallybook dead retry` or `tallybook dead drop`.',
    jsonb_build_object('last_day', v_dead, 'last_hour', v_last_hour, 'at_most', 1000));
  return query select * from tallybook._finding('breakers', (
      select jsonb_agg(jsonb_build_object('level', 'note', 'name', b.name, 'state', b.state, 'open_until', b.open_until,
                                          'changed_at', b.changed_at,
                         'text', format('breaker %s has been %s for %s and holds back %s jobs',
                                        to_json(b.name), b.state, tallybook._ago(p_at - b.changed_at),
                           (select case when count(*) = 1001 then 'more than 1000' else count(*)::text end
                              from (select from tallybook.concurrency_line c where c.name = b.name limit 1001) c)))
                                   order by b.changed_at, b.name)
        from tallybook.breaker_state b where b.state <> 'closed'),
    'no breaker is open', 'The service that its jobs call is failing. A probe closes the breaker when the service '
                          'works again. To close it now: `tallybook breaker close`.');
end $$;
