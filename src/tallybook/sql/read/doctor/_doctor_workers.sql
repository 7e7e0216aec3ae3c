-- _doctor_workers(at): silent and lost workers, long running jobs, workers older than the schema, connections.
-- profile: nojit
-- rights: operator
create or replace function tallybook._doctor_workers(p_at timestamptz) returns setof tallybook._check
language plpgsql stable
set plan_cache_mode = force_generic_plan  -- planning again costs more than it gains
as $$
declare v_live bigint; v_used bigint; v_most int := current_setting('max_connections')::int; v_share numeric;
begin
  select count(*) into v_live from tallybook.worker w where w.ended_at is null and w.seen_at >= p_at - w.lease;
  return query select * from tallybook._finding('workers', coalesce((
      select jsonb_agg(jsonb_build_object('level', 'warning', 'worker_id', w.id, 'worker', w.name, 'seen_at',
                                          nullif(w.seen_at, '-infinity'),
                         'text', format('worker %s (%s) %s', to_json(w.name), w.id, x.what)) order by w.id)
        from tallybook.worker w,
             lateral (select case when w.seen_at = '-infinity'
                      then 'was stopped, and its open jobs have not been returned yet'
                                  when w.seen_at < p_at - w.lease then format(
                                      'has sent no heartbeat for %s; its lease is %s',
                                      tallybook._ago(p_at - greatest(w.seen_at, w.started_at)), tallybook._ago(w.lease))
                                  when w.session and not exists (
                                    select from pg_locks k join pg_database d on d.oid = k.database
                                           and d.datname = current_database()
                                     where k.locktype = 'advisory' and k.classid = 1413565443 and k.objid = w.id
                                           and k.objsubid = 2 and k.granted)
                                  then 'has lost its session' end) x(what)
       where w.ended_at is null and x.what is not null),
      case when v_live = 0 then '[{"level": "note", "text": "no worker is running"}]'::jsonb end),
    format('%s live', case v_live when 1 then '1 worker' else v_live || ' workers' end),
    'Another worker rescues the jobs of a dead one within seconds. If no worker is running, start one: `tallybook '
    'worker`. If a worker is frozen (kill -CONT resumes it) or disconnected, '
    'repair that, or end its process. No job is lost in any case.', jsonb_build_object('live', v_live));

  return query select * from tallybook._finding('running', (
      select jsonb_agg(jsonb_build_object('level', 'note', 'job_id', r.job_id, 'task', r.task, 'worker', r.worker,
                                          'started_at', r.started_at,
                         'text', format('job %s (%s) has been running for %s on %s', r.job_id, r.task,
                                        tallybook._ago(p_at - r.started_at), r.worker)) order by r.started_at)
        from tallybook.running(100) r where r.started_at < p_at - interval '1 hour'),
    'no job has been running for longer than 1 h',
    'If that is too long, stop the job with `tallybook job cancel ID`, and set a `timeout` for its task.');

  return query select * from tallybook._finding('releases', (
      select jsonb_agg(jsonb_build_object('level', 'note', 'worker_id', w.id, 'worker', w.name, 'started_at',
                                          w.started_at,
                         'text', format('worker %s was started before the schema was migrated', to_json(w.name)))
                         order by w.id)
        from tallybook.worker w, tallybook.installation i where w.ended_at is null and w.started_at < i.migrated_at),
    'no worker was started before the last migration',
    'It continues to use the functions of its release, which are kept. Restart it with the new release when '
    'convenient.');

  select sum(d.numbackends) into v_used from pg_stat_database d;
  v_share := v_used::numeric / v_most;
  return query select * from tallybook._finding('connections', case when v_share >= 0.8 then
      jsonb_build_array(jsonb_build_object('level', case when v_share >= 0.95 then 'problem' else 'warning' end,
                                           'text', format('%s of %s connections are in use', v_used, v_most))) end,
    format('%s of %s connections are in use', v_used, v_most),
    'New connections may be refused. Make pools smaller (a worker keeps 5, and one for each atomic task that '
    'runs), put a pooler in front of the server, or raise max_connections.',
    jsonb_build_object('used', v_used, 'max', v_most, 'reserved',
                       current_setting('superuser_reserved_connections')::int, 'of_live_workers_about', 5 * v_live));
end $$;
