-- _schedule_fire_query(plan, at): fire one query-driven schedule that is due, in a transaction of its own.
--
-- The plan is that of _schedules_fire. Each tick puts in what the query yields. An error of the query is on record as failed, with
-- its message. carried: whether the plan was carried out; not, if the schedule has changed since, or another is at it.
-- The schedule's row is not locked while the query runs, only an advisory lock is held (class 1413565449), which everybody only
-- tries: a person can pause or drop a schedule whose query is slow. At the end the row moves on if nobody has changed it meanwhile.
-- Errors: TB003 but in READ COMMITTED; what is no fault of the query's (deadlocks, a full disk, a stop), and a cancelled statement: then
-- nothing is on record, and the caller says _schedule_query_failed. Reads and writes schedule, fire; writes what enqueue does.
create or replace function tallybook._schedule_fire_query(p_plan jsonb, p_at timestamptz default clock_timestamp(),
  out carried boolean, out jobs bigint, out fired int, out failed int, out reason text)
language plpgsql as $$
declare
  p record; v_tick timestamptz; v_jobs bigint; v_missed int := 0;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'a schedule is fired in READ COMMITTED' using errcode = 'TB003';
  end if;
  carried := false; jobs := 0; fired := 0; failed := 0;
  select x.* into p from jsonb_to_record(p_plan)
    x(name text, revision xid8, tick timestamptz, late timestamptz[], ticks timestamptz[], missed_from timestamptz, missed_ticks int,
      next timestamptz, due timestamptz, problem text, now boolean);
  p.now := coalesce(p.now, false);
  if not tallybook._schedule_query_ours(p.name) then
    if p.now then
      insert into tallybook.fire (schedule, tick, fired_at, what, reason) select p.name, k, p_at, 'skipped', 'overlap' from unnest(p.ticks) k;
      update tallybook.schedule s set skipped_count = s.skipped_count + cardinality(p.ticks) where s.name = p.name;
    end if;
    return;
  end if;
  perform from tallybook.schedule s
    where s.name = p.name and (p.now or s.revision = p.revision and s.tick is not distinct from p.tick and s.paused_at is null);
  if not found then return; end if;
  carried := true;
  if p.missed_from is not null then
    insert into tallybook.fire (schedule, tick, fired_at, what, ticks) values (p.name, p.missed_from, p_at, 'missed', p.missed_ticks)
    on conflict do nothing;
    if found then v_missed := p.missed_ticks; end if;
  end if;
  for v_tick in select k from unnest(p.late || p.ticks) k order by k loop
    insert into tallybook.fire (schedule, tick, fired_at, what, reason)
    values (p.name, v_tick, p_at, 'enqueued', case when v_tick = any (p.late) then 'late' end) on conflict do nothing;
    continue when not found;
    begin
      v_jobs := tallybook._fire_query(p.name, v_tick, p_at);
      update tallybook.fire f set jobs = v_jobs where f.schedule = p.name and f.tick = v_tick;
      jobs := jobs + v_jobs; fired := fired + 1;
    exception when others then
      if sqlstate ~ '^(40|53|55|57|58|25|XX)' then raise; end if;
      reason := left(sqlerrm, 2000);
      update tallybook.fire f set what = 'failed', reason = _schedule_fire_query.reason where f.schedule = p.name and f.tick = v_tick;
      failed := failed + 1;
    end;
  end loop;
  update tallybook.schedule s
     set fired_count = s.fired_count + fired, failed_count = s.failed_count + failed, missed_count = s.missed_count + v_missed
   where s.name = p.name;
  update tallybook.schedule s set tick = p.next, due_at = p.due, problem = p.problem
   where s.name = p.name and s.revision = p.revision and s.tick is not distinct from p.tick and s.paused_at is null and not p.now;
end $$;

-- _fire_query(name, tick, at): put in what the query of a schedule yields now. Returns how many jobs.
create or replace function tallybook._fire_query(p_name text, p_tick timestamptz, p_at timestamptz) returns bigint
language plpgsql as $$
declare
  s tallybook.schedule;
begin
  select k.* into s from tallybook.schedule k where k.name = p_name;
  return (select e.created from tallybook.enqueue_from(s.query, s.queue, s.task, s.priority, s.max_attempts, s.headers,
            coalesce(s.options, '{}') || jsonb_build_object('schedule', s.name, 'tick', p_tick), p_at) e);
end $$;

-- _schedule_query_failed(plan, reason, at): puts on record that a query-driven schedule could not be fired, where that took the
-- transaction along: its time was up, somebody cancelled it, it met the same contention again and again. False: not ours to say.
create or replace function tallybook._schedule_query_failed(p_plan jsonb, p_reason text, p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  if not tallybook._schedule_query_ours(p_plan ->> 'name') then return false; end if;
  perform from tallybook.schedule s
    where s.name = p_plan ->> 'name' and s.revision = (p_plan ->> 'revision')::xid8 and s.paused_at is null
      and s.tick is not distinct from (p_plan ->> 'tick')::timestamptz for update skip locked;
  if not found then return false; end if;
  perform tallybook._schedule_failed(p_plan, p_reason, p_at);
  return true;
end $$;

-- _schedule_query_ours(name): whether nobody else runs this schedule's query; nobody does until the transaction has ended.
create or replace function tallybook._schedule_query_ours(p_name text) returns boolean
language sql as $$ select pg_try_advisory_xact_lock(1413565449, hashtext('query of ' || p_name)) $$;
