-- schedule_run(name): fire a schedule now, beside its ticks: the same path, the same guard, the same retries.
--
-- Its own instant is the tick. what is enqueued (job_id, and jobs: how many), skipped (reason overlap: the job of the last fire
-- has not ended for good, or the query runs right now) or failed (of a query-driven one, with the error). A paused one can be run. The next tick stays.
-- Errors: TB002 no such schedule; TB003 an isolation level other than READ COMMITTED, whose snapshot may miss the last job's end.
-- Reads and writes schedule; writes fire, and what enqueue writes.
create or replace function tallybook.schedule_run(name text, at timestamptz default clock_timestamp(),
  out what text, out reason text, out job_id bigint, out jobs bigint, out tick timestamptz)
language plpgsql as $$
declare
  s tallybook.schedule; v_plan jsonb;
begin
  select k.* into s from tallybook.schedule k where k.name = schedule_run.name and k.query is null for update;
  if not found then  -- the row of a query-driven one stays free while the query runs
    select k.* into s from tallybook.schedule k where k.name = schedule_run.name;
    if not found then perform tallybook._known_schedule(schedule_run.name); end if;
  end if;
  schedule_run.tick := schedule_run.at;
  while exists (select from tallybook.fire f where f.schedule = s.name and f.tick = schedule_run.tick) loop
    schedule_run.tick := schedule_run.tick + interval '1 us';
  end loop;
  v_plan := jsonb_build_object('name', s.name, 'revision', s.revision::text, 'tick', s.tick, 'late', '[]'::jsonb,
    'ticks', jsonb_build_array(schedule_run.tick), 'next', s.tick, 'due', s.due_at, 'problem', s.problem, 'now', true);
  if s.query is null then
    perform tallybook._schedules_fire(jsonb_build_array(v_plan), schedule_run.at);
  else
    perform tallybook._schedule_fire_query(v_plan, schedule_run.at);
  end if;
  select f.what, f.reason, f.job_id, f.jobs into schedule_run.what, schedule_run.reason, schedule_run.job_id, schedule_run.jobs
    from tallybook.fire f where f.schedule = s.name and f.tick = schedule_run.tick;
end $$;
