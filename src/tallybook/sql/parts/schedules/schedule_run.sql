-- schedule_run(name): fire a schedule now, in addition to its ticks, with the same overlap check and the same retries.
--
-- The recorded tick is the current time. what is enqueued (with job_id, and in jobs the number of jobs), skipped
-- (reason overlap: the job of the last fire is open, or the query is running) or failed (query-driven schedules only,
-- with the error). A paused schedule can be run. The next tick does not change. If roles are in use, an operator cannot
-- run a query-driven schedule (42501), because its query would run with the operator's rights.
-- Errors: TB002 unknown schedule; TB003 an isolation level other than READ COMMITTED, whose snapshot may miss the last
-- job's end.
-- Reads and writes schedule; writes fire, and what enqueue writes.
-- rights: operator, as the caller
create or replace function tallybook.schedule_run(name text, at timestamptz default clock_timestamp(),
  out what text, out reason text, out job_id bigint, out jobs bigint, out tick timestamptz)
language plpgsql as $$
begin
  tick := tallybook._schedule_run_plain(name, at);
  if tick is null then  -- query-driven: its row stays free while the query runs
    tick := tallybook._schedule_free_tick(name, at);
    perform tallybook._schedule_fire_query(tallybook._schedule_plan(s, schedule_run.tick), at)
       from tallybook._schedule_of(name) s;
  end if;
  select f.what, f.reason, f.job_id, f.jobs into what, reason, job_id, jobs
    from tallybook._schedule_fired(name, schedule_run.tick) f;
end $$;

-- _schedule_fired(name, tick): what became of a tick.
-- rights: operator
create or replace function tallybook._schedule_fired(p_name text, p_tick timestamptz) returns tallybook.fire
language sql stable as $$ select f from tallybook.fire f where f.schedule = p_name and f.tick = p_tick $$;

-- _schedule_run_plain(name, at): fire one without a query. Returns the tick; null: it has a query. Errors: TB002.
-- rights: operator
create or replace function tallybook._schedule_run_plain(p_name text, p_at timestamptz) returns timestamptz
language plpgsql as $$
declare s tallybook.schedule; v_tick timestamptz;
begin
  select k.* into s from tallybook.schedule k where k.name = p_name and k.query is null for update;
  if not found then
    perform tallybook._known_schedule(p_name);
    return null;
  end if;
  v_tick := tallybook._schedule_free_tick(p_name, p_at);
  perform tallybook._schedules_fire(jsonb_build_array(tallybook._schedule_plan(s, v_tick)), p_at);
  return v_tick;
end $$;

-- _schedule_free_tick(name, at): the first instant from then on that no fire has.
create or replace function tallybook._schedule_free_tick(p_name text, p_at timestamptz) returns timestamptz
language plpgsql as $$
begin
  while exists (select from tallybook.fire f where f.schedule = p_name and f.tick = p_at) loop
    p_at := p_at + interval '1 us';
  end loop;
  return p_at;
end $$;

-- _schedule_plan(schedule, tick): the plan of _schedules_fire that fires it now.
create or replace function tallybook._schedule_plan(s tallybook.schedule, p_tick timestamptz) returns jsonb
language sql stable as $$
  select jsonb_build_object('name', s.name, 'revision', s.revision::text, 'tick', s.tick, 'late', '[]'::jsonb,
    'ticks', jsonb_build_array(p_tick), 'next', s.tick, 'due', s.due_at, 'problem', s.problem, 'now', true)
$$;
