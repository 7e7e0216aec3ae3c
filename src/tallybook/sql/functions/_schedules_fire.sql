-- _schedules_fire(plans, at): carry out what a worker has computed for schedules that were due. Returns how many of them were
-- carried out, and the counts of their ticks.
--
-- plans: [{"name", "revision" and "tick" as read, "late": [ticks], "ticks": [ticks], "missed_from", "missed_ticks", "next",
-- "due", "problem", "now"}]. A plan counts only for the row that it was made from: where that has moved on, was changed or
-- paused, or is in another's hands, nothing is done. Whose row (schedule, tick) in fire is inserted has fired that tick; the
-- job is put in by the same statement. late: missed ticks that are fired all the same, in their order and one at a time.
-- now: a person's doing, which a pause does not stop.
-- Only READ COMMITTED: the job of the last fire is looked up after the row was locked, in a newer snapshot.
-- One that cannot be fired is on record as failed, and holds up no other.
-- Reads and writes schedule; writes fire, entry, at first use lane; service.
create or replace function tallybook._schedules_fire(p_plans jsonb, p_at timestamptz default clock_timestamp(),
  out carried int, out fired int, out skipped int, out missed int, out failed int)
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_started timestamptz := clock_timestamp();
  v_names text[]; v_one jsonb; r record;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'a schedule is fired in READ COMMITTED' using errcode = 'TB003', hint = 'An older snapshot may overlook the job of its last fire.';
  end if;
  fired := 0; skipped := 0; missed := 0; failed := 0;
  v_names := array(
    select s.name from jsonb_to_recordset(p_plans) p(name text, revision xid8, tick timestamptz, now boolean)
      join tallybook.schedule s on s.name = p.name
     where s.revision = p.revision and s.tick is not distinct from p.tick and (s.paused_at is null or p.now)
     order by s.name for update of s skip locked);
  carried := cardinality(v_names);
  if carried = 0 then
    if p_plans = '[]' then perform tallybook._service_ran('schedules', v_started, 0); end if;  -- somebody has looked
    return;
  end if;
  begin
    select * into r from tallybook._schedules_put_in(p_plans, v_names, p_at);
    fired := r.fired; skipped := r.skipped; missed := r.missed;
  exception when others then
    perform tallybook._raise_again(sqlstate, sqlerrm);
    for v_one in select p from jsonb_array_elements(p_plans) p where p ->> 'name' = any (v_names) loop
      begin
        select * into r from tallybook._schedules_put_in(jsonb_build_array(v_one), array[v_one ->> 'name'], p_at);
        fired := fired + r.fired; skipped := skipped + r.skipped; missed := missed + r.missed;
      exception when others then
        perform tallybook._raise_again(sqlstate, sqlerrm);
        perform tallybook._schedule_failed(v_one, sqlerrm, p_at);
        failed := failed + 1;
      end;
    end loop;
  end;
  perform tallybook._service_ran('schedules', v_started, fired);
end $$;

-- _raise_again(sqlstate, message): what is not the schedule's fault (deadlocks, a full disk, a stop) stays an error of the call.
create or replace function tallybook._raise_again(p_sqlstate text, p_message text) returns void
language plpgsql immutable as $$
begin
  if p_sqlstate ~ '^(40|53|55|57|58|25|XX)' then
    raise exception '%', p_message using errcode = p_sqlstate;
  end if;
end $$;

-- _schedules_put_in(plans, names, at): the same for rows that the caller has locked, by one statement.
create or replace function tallybook._schedules_put_in(p_plans jsonb, p_names text[], p_at timestamptz,
  out fired int, out skipped int, out missed int)
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  with s as materialized (
    -- in_line: one that catches up with missed ticks puts in several at once, which run one after the other.
    select s.name, s.queue, s.task, s.args, s.priority, s.max_attempts, s.headers, s.options, s.overlap, s.last_job_id, s.line,
           not s.overlap and s.missed = 'all' as in_line,
           not s.overlap and (tallybook._job_open(s.last_job_id) or exists (select from unnest(s.line) j where tallybook._job_open(j))) as live,
           p.late, p.ticks, p.missed_from, p.missed_ticks, p.next, p.due, p.problem
      from jsonb_to_recordset(p_plans) p(name text, late timestamptz[], ticks timestamptz[], missed_from timestamptz, missed_ticks int,
                                         next timestamptz, due timestamptz, problem text)
      join tallybook.schedule s on s.name = p.name
     where p.name = any (p_names)
  ), t as (
    select s.name, x.tick, x.late,
           case when s.overlap or x.late and s.in_line then 'enqueued'
                when s.live or row_number() over (partition by s.name order by x.tick) > 1 then 'skipped'
                else 'enqueued' end as what
      from s, lateral (select l, true from unnest(s.late) l union all select k, false from unnest(s.ticks) k) x(tick, late)
  ), f as (
    insert into tallybook.fire (schedule, tick, fired_at, what, reason, job_id, jobs)
    select o.name, o.tick, p_at, o.what, case when o.what = 'skipped' then 'overlap' when o.late then 'late' end,
           case when o.what = 'enqueued' then nextval('tallybook.job_id') end, case when o.what = 'enqueued' then 1 end
      from (select t.* from t order by t.tick, t.name) o
    on conflict do nothing
    returning fire.schedule, fire.tick, fire.what, fire.job_id
  ), m as (
    insert into tallybook.fire (schedule, tick, fired_at, what, ticks)
    select s.name, s.missed_from, p_at, 'missed', s.missed_ticks from s where s.missed_from is not null order by s.name
    on conflict do nothing
    returning fire.schedule, fire.ticks
  ), put as materialized (
    select tallybook._put(j.job_id, s.queue, s.task, s.args, null, s.priority, null, s.max_attempts, s.headers, p_at,
                          case when s.in_line then 'schedule:' || s.name end, null,
                          coalesce(s.options, '{}') || jsonb_build_object('schedule', s.name, 'tick', j.tick))
      from f j join s on s.name = j.schedule where j.what = 'enqueued'
  ), said as (
    select s.name, s.next, s.due, s.problem, s.in_line, s.last_job_id, s.line, coalesce(e.fired, 0) as fired, coalesce(e.skipped, 0) as skipped,
           e.jobs, coalesce(m.ticks, 0) as missed
      from s left join m on m.schedule = s.name
      left join (select f.schedule, count(*) filter (where f.what = 'enqueued') as fired, count(*) filter (where f.what = 'skipped') as skipped,
                        array_agg(f.job_id order by f.job_id) filter (where f.what = 'enqueued') as jobs
                   from f group by f.schedule) e on e.schedule = s.name
  ), moved as (
    update tallybook.schedule k
       set tick = d.next, due_at = d.due, problem = d.problem, fired_count = k.fired_count + d.fired,
           skipped_count = k.skipped_count + d.skipped, missed_count = k.missed_count + d.missed,
           last_job_id = coalesce(d.jobs[cardinality(d.jobs)], k.last_job_id),
           line = case when not d.in_line then null when d.jobs is null then k.line
                       else array(select j from unnest(d.line || d.last_job_id || d.jobs[:cardinality(d.jobs) - 1]) j
                                   where j = any (d.jobs) or tallybook._job_open(j)) end
      from said d where k.name = d.name
  )
  select coalesce(sum(d.fired), 0), coalesce(sum(d.skipped), 0), coalesce(sum(d.missed), 0) + 0 * (select count(*) from put)
    into _schedules_put_in.fired, _schedules_put_in.skipped, _schedules_put_in.missed from said d;
end $$;

-- _schedule_failed(plan, reason, at): its ticks could not be fired; the schedule goes on with the next.
create or replace function tallybook._schedule_failed(p_plan jsonb, p_reason text, p_at timestamptz) returns void
language sql as $$
  with p as (
    select p.* from jsonb_to_record(p_plan) p(name text, late timestamptz[], ticks timestamptz[], next timestamptz, due timestamptz)
  ), f as (
    insert into tallybook.fire (schedule, tick, fired_at, what, reason)
    select p.name, k, p_at, 'failed', left(p_reason, 2000) from p, unnest(p.late || p.ticks) k order by k
    on conflict do nothing
    returning fire.tick
  )
  update tallybook.schedule s set tick = p.next, due_at = p.due, failed_count = s.failed_count + (select count(*) from f)
    from p where s.name = p.name
$$;
