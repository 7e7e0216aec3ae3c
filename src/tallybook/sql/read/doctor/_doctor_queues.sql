-- _doctor_queues(at): jobs in line that nobody serves, paused queues, old backlogs, dead letters, open breakers.
--
-- Asks each lane for its next job, as a claim does, at most 10,000 lanes; how many stand behind it is for the counters.
-- rights: operator
create or replace function tallybook._doctor_queues(p_at timestamptz)
returns table (name text, level text, finding text, advice text, details jsonb) language plpgsql stable
-- profile: hot
set enable_nestloop = on  -- also where the caller has it off
as $$
#variable_conflict use_column
declare
  v_lanes jsonb := '[]'; v_dead bigint; v_last_hour bigint;
begin
  if not tallybook._is_foreign_cluster(true) then  -- else no cursor means anything: see cluster
    select coalesce(jsonb_agg(jsonb_build_object('queue', n.queue, 'part', n.part, 'oldest', n.oldest, 'ago',
                                                 tallybook._ago(p_at - n.oldest),
                      'paused', q.paused_at is not null, 'served', exists (select from tallybook.worker w
                                         where w.ended_at is null and w.seen_at >= p_at - w.lease
                                               and n.queue = any (w.queues)
                                           and (n.part = '' or n.part = any (w.parts)))) order by n.oldest, n.queue,
                                               n.part), '[]')
      into v_lanes
      from (select l.queue, l.part, min(e.since) as oldest
              from (select * from tallybook.lane x where x.retired_at is null order by x.lane_id limit 10000) l
              cross join lateral (select tallybook._next(l.lane_id, l.retention, l.born) as xid) n
              left join lateral (select greatest(x.run_at, x.enqueued_at) as since from tallybook.entry x
                                  where x.lane_id = l.lane_id and x.retention = l.retention and x.xid = n.xid
                                        order by x.seq desc limit 1) e on true
             where n.xid is not null group by l.queue, l.part) n
      left join tallybook.queue q on q.name = n.queue;
  end if;

  return query select * from tallybook._finding('unserved_queues', (
      select jsonb_agg(jsonb_build_object('level', 'warning', 'text',
                                          format('queue %s has jobs in line for %s, and no live worker serves it',
                                                 l -> 'queue', l ->> 'ago')) || l order by n)
        from jsonb_array_elements(v_lanes) with ordinality x(l, n) where l ->> 'part' in ('', 'turn', 'fair')
             and not (l ->> 'served')::boolean and not (l ->> 'paused')::boolean),
    'every queue with jobs in line is served',
    'Start a worker that serves it: `tallybook worker --queues`, or correct the name where the jobs are put in.');
  return query select * from tallybook._finding('unserved_tasks', (
      select jsonb_agg(jsonb_build_object('level', 'warning', 'text',
                                          format('queue %s has jobs of %s in line for %s, which no live worker knows',
                                                 l -> 'queue',
                         case when l ->> 'part' like 'version:%' then format('task %s in version %s',
                             to_json(split_part(l ->> 'part', ':', 3)), split_part(l ->> 'part', ':', 2))
                              else 'task ' || to_json(substr(l ->> 'part', 6)) end, l ->> 'ago')) || l order by n)
        from jsonb_array_elements(v_lanes) with ordinality x(l, n) where l ->> 'part' not in ('', 'turn', 'fair')
             and not (l ->> 'served')::boolean),
    'every task that was put aside is known to a live worker',
    'Start a worker of the release that knows it, give a renamed task its old name as an alias, or cancel these jobs.');
  return query select * from tallybook._finding('paused', (
      select jsonb_agg(jsonb_build_object('level', case when l.oldest < p_at - interval '1 hour' then 'warning'
                                          else 'note' end, 'queue', q.name,
                         'paused_at', q.paused_at, 'paused_by', q.paused_by, 'oldest', l.oldest,
                         'text', format('queue %s is paused for %s by %s, %s', to_json(q.name),
                                        tallybook._ago(p_at - q.paused_at), q.paused_by,
                                        coalesce('with jobs in line for ' || tallybook._ago(p_at - l.oldest),
                                                 'with nothing in line'))) order by l.oldest nulls last, q.name)
        from tallybook.queue q
        left join lateral (select min((e ->> 'oldest')::timestamptz) as oldest from jsonb_array_elements(v_lanes) e
                           where e ->> 'queue' = q.name) l on true
       where q.paused_at is not null),
    'no queue is paused', 'Once its reason is gone: `tallybook queue resume`.');
  return query select * from tallybook._finding('backlog', (
      select jsonb_agg(jsonb_build_object('level', case when (l ->> 'oldest')::timestamptz < p_at - interval '1 hour'
                                          then 'warning' else 'note' end,
                         'text', format('the next job of queue %s waits for %s', l -> 'queue', l ->> 'ago')) || l
                         order by n)
        from jsonb_array_elements(v_lanes) with ordinality x(l, n)
       where (l ->> 'served')::boolean and not (l ->> 'paused')::boolean
             and (l ->> 'oldest')::timestamptz < p_at - interval '10 min'),
    'no job waits for longer than 10 min in a queue that is served',
    'More comes in than its workers get done: more slots or workers, or a look at what is slow: `tallybook top`. Jobs '
    'of a lower priority wait for those before them.');

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
    'See why with `tallybook dead list`, mend it, then `tallybook dead retry` or `tallybook dead drop`.',
    jsonb_build_object('last_day', v_dead, 'last_hour', v_last_hour, 'at_most', 1000));
  return query select * from tallybook._finding('breakers', (
      select jsonb_agg(jsonb_build_object('level', 'note', 'name', b.name, 'state', b.state, 'open_until', b.open_until,
                                          'changed_at', b.changed_at,
                         'text', format('the breaker %s is %s for %s, and holds %s jobs', to_json(b.name), b.state,
                                        tallybook._ago(p_at - b.changed_at),
                           (select case when count(*) = 1001 then 'more than 1000' else count(*)::text end
                              from (select from tallybook.concurrency_line c where c.name = b.name limit 1001) c)))
                                   order by b.changed_at, b.name)
        from tallybook.breaker_state b where b.state <> 'closed'),
    'no breaker is open', 'What it guards fails. Once it works again one job finds out by itself, sooner with '
                          '`tallybook breaker close`.');
end $$;
