-- _schedule_query_begin(plan, at): the first step of _schedule_fire_query: whether to execute the plan
-- (no other session does, and the schedule has not changed); if so, missed ticks are recorded, and missed is
-- their number.
-- Reads and writes schedule, fire.
-- rights: worker
create or replace function tallybook._schedule_query_begin(p tallybook._plan, p_at timestamptz, out carried boolean,
  out missed int)
language plpgsql as $$
begin
  carried := false; missed := 0; p.now := coalesce(p.now, false);
  if not tallybook._schedule_query_ours(p.name) then
    if p.now then
      insert into tallybook.fire (schedule, tick, fired_at, what, reason) select p.name, k, p_at, 'skipped', 'overlap'
        from unnest(p.ticks) k;
      update tallybook.schedule s set skipped_count = s.skipped_count + cardinality(p.ticks) where s.name = p.name;
    end if;
    return;
  end if;
  carried := exists (select from tallybook.schedule s
                      where s.name = p.name and (p.now or s.revision = p.revision
                                                 and s.tick is not distinct from p.tick and s.paused_at is null));
  insert into tallybook.fire (schedule, tick, fired_at, what, ticks)
  select p.name, p.missed_from, p_at, 'missed', p.missed_ticks where carried and p.missed_from is not null
  on conflict do nothing;
  if found then missed := p.missed_ticks; end if;
end $$;

-- _schedule_query_tick(name, tick, late, at): record a tick as fired. False: it is recorded already. Writes
-- fire.
-- rights: worker
create or replace function tallybook._schedule_query_tick(p_name text, p_tick timestamptz, p_late boolean,
  p_at timestamptz) returns boolean
language plpgsql as $$
begin
  insert into tallybook.fire (schedule, tick, fired_at, what, reason)
  values (p_name, p_tick, p_at, 'enqueued', case when p_late then 'late' end) on conflict do nothing;
  return found;
end $$;

-- _schedule_query_ended(name, tick, jobs, reason): record the result of a tick's query: the number of jobs, or null and
-- why it failed. Writes fire.
-- rights: worker
create or replace function tallybook._schedule_query_ended(p_name text, p_tick timestamptz, p_jobs bigint,
  p_reason text) returns void
language sql as $$
  update tallybook.fire f
     set jobs = p_jobs, reason = coalesce(p_reason, f.reason),
         what = case when p_jobs is null then 'failed' else f.what end
   where f.schedule = p_name and f.tick = p_tick
$$;

-- _schedule_query_over(plan, fired, failed, missed): the last step: count, and move the schedule on if nobody has
-- changed it. Writes schedule.
-- rights: worker
create or replace function tallybook._schedule_query_over(p tallybook._plan, p_fired int, p_failed int,
  p_missed int) returns void
language sql as $$
  update tallybook.schedule s
     set fired_count = s.fired_count + p_fired, failed_count = s.failed_count + p_failed,
         missed_count = s.missed_count + p_missed
   where s.name = p.name;
  update tallybook.schedule s set tick = p.next, due_at = p.due, problem = p.problem
   where s.name = p.name and s.revision = p.revision and s.tick is not distinct from p.tick and s.paused_at is null
     and p.now is not true
$$;

-- _schedule_of(name): its row, for who runs its query.
-- rights: worker
create or replace function tallybook._schedule_of(p_name text) returns tallybook.schedule
language sql stable as $$ select k from tallybook.schedule k where k.name = p_name $$;
