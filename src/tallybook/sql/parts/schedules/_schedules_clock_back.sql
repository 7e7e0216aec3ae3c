-- _schedules_clock_back(at): after a step back of the clock, schedules that tick more often than the step is long tick
-- again from now on, and forget their ticks ahead; the others wait for their next tick, so that none is fired twice.
-- Writes schedule, fire.
-- profile: nojit
create or replace function tallybook._schedules_clock_back(p_at timestamptz) returns void language plpgsql as $$
declare v_ticking text[];
begin
  v_ticking := array(
    select k.name from tallybook.schedule k,
           lateral (select coalesce(max(f.tick), k.since) as tick from tallybook.fire f where f.schedule = k.name) l
     where k.due_at > p_at and (k.tick is null or l.tick > p_at and k.tick - l.tick <= l.tick - p_at)
     order by k.name for update of k);
  delete from tallybook.fire f where f.schedule = any (v_ticking) and f.tick > p_at;
  update tallybook.schedule k set since = p_at, tick = null, due_at = p_at where k.name = any (v_ticking);
end $$;
