-- _doctor_maintenance(at): another cluster, services that do not run, steps of the server's clock, schedules that do
-- not fire, ranges of history that cannot be dropped.
-- rights: operator
create or replace function tallybook._doctor_maintenance(p_at timestamptz) returns setof tallybook._check
language plpgsql stable as $$
declare v_since timestamptz;
begin
  return query select * from tallybook._finding('cluster', case when tallybook._is_foreign_cluster(true) then
      '[{"level": "problem", "text": "this database came from another cluster, and its jobs cannot be claimed here '
      'yet"}]'::jsonb end,
    'this database is in its original cluster, or was moved completely',
    'Run `tallybook migrate`, or start a worker. Either makes the jobs claimable.');

  select min(w.started_at) into v_since from tallybook.worker w where w.ended_at is null
         and w.seen_at >= p_at - w.lease;
  return query select * from tallybook._finding('services', (
      select jsonb_agg(jsonb_build_object('level', 'warning', 'service', s.name, 'last_run_at', s.last_run_at,
                         'text', format('%s has not run %s', s.name, coalesce('for '
                             || tallybook._ago(p_at - s.last_run_at), 'yet'))) order by s.name)
        from tallybook.service s
       where coalesce(s.last_run_at, '-infinity') < p_at - greatest(2 * s.every, interval '2 min')
         and v_since < p_at - greatest(2 * s.every, interval '2 min')),
    case when v_since is null then 'no worker is running, so no service runs' else 'all services run' end,
    'Look for errors in the logs of the workers. If all of them have `--no-maintenance`, start one without it. To run '
    'a service by hand: `select tallybook.NAME()`, '
    'for promote, rescue, rebase, concurrency_release, fair_release, parents_resolve, fold and prune.');

  return query select * from tallybook._finding('clock_steps', (
      select jsonb_agg(jsonb_build_object('level', 'warning', 'noticed_at', c.noticed_at, 'by', c.by,
                         'text', format('the clock of the server stepped %s by %s, %s ago',
                                        case when c.by < '0' then 'back' else 'forward' end,
                                        tallybook._ago(greatest(c.by, -c.by)), tallybook._ago(p_at - c.noticed_at)))
                       order by c.id desc)
        from tallybook.clock_step c where c.noticed_at between p_at - interval '1 day' and p_at),
    'the clock of the server has not stepped in the last day',
    'Configure NTP to slew the clock of the server. Jobs, limits and schedules continue after a step: '
    'see https://github.com/tallybook/tallybook/blob/main/docs/services.md.');

  return query select * from tallybook._finding('schedules', (
      select jsonb_agg(jsonb_build_object('level', x.level, 'schedule', s.name, 'text', x.text, 'due_at', s.due_at)
                       order by x.level desc, s.name)
        from tallybook.schedule s
        left join lateral (  -- of its newest ticks only
          select count(*) as bad, max(f.fired_at) as newest, string_agg(distinct f.what, ' and ') as what
            from (select k.fired_at, k.what from tallybook.fire k where k.schedule = s.name order by k.tick desc
                  limit 100) f
           where f.what in ('missed', 'failed') and f.fired_at > p_at - interval '1 day') f on true,
        lateral (values ('warning', case when s.problem is not null
                         then format('schedule %s cannot be computed: %s', to_json(s.name), s.problem) end),
                        ('warning', case when s.due_at < p_at - interval '1 min'
                         then format(case when s.tick is null then 'no worker has seen schedule %s, set %s ago'
                                          else 'the tick of schedule %s is %s late' end, to_json(s.name),
                                     tallybook._ago(p_at - s.due_at)) end),
                        ('note', case when f.bad > 0 then format('schedule %s has %s ticks, the last %s ago',
                         to_json(s.name), f.what, tallybook._ago(p_at - f.newest)) end)) x(level, text)
       where x.text is not null),
    'every schedule fires on time',
    'Workers fire the ticks, so check that one is running. `tallybook schedule list` shows errors in the schedule '
    'itself.');

  return query select * from tallybook._finding('partitions', (
      select jsonb_agg(jsonb_build_object('level', case when h.due_at < p_at - interval '1 day' then 'warning'
                                          else 'note' end,
                         'text', format('a range of %s history has been due to be dropped for %s, but is held: %s%s',
                                        h.class, tallybook._ago(p_at - h.due_at),
                                        case when h.open_jobs > 0 then h.open_jobs || ' ' end, h.why)) || to_jsonb(h)
                       order by h.due_at)
        from tallybook.held_ranges(p_at) h),
    'all old history has been dropped',
    'It is dropped when nothing holds it any more: '
    'see https://github.com/tallybook/tallybook/blob/main/docs/history.md.');
end $$;
