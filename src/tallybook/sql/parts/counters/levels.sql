-- levels(step, since, queue, at): the counters as a time series: per step of time what came and ended in it, and how
-- many jobs were in each state at its end, in all queues or in one.
--
-- The numbers of now are walked back through the changes, so each point is exact at the end of its step; of the step
-- that is not over, now.
--   step   whole minutes. Of a time for which only longer steps are kept (series_step), changes are told at the
--          beginning of these
--   since  60 steps ago where it is null; the first step is the one that it lies in
-- Errors: TB005 a step that is not of whole minutes, more than 10,000 steps. Reads what counts reads, and series.
-- rights: operator, reader, metrics
create or replace function tallybook.levels(step interval default '1 min', since timestamptz default null,
  queue text default null, at timestamptz default clock_timestamp(), out begins timestamptz, out scheduled bigint,
  out retrying bigint, out waiting bigint, out open bigint, out dead bigint, out completed bigint, out failed bigint,
  out cancelled bigint, out died bigint)
returns setof record language plpgsql stable
-- profile: hot
as $$
#variable_conflict use_column
declare
  v_since timestamptz;
begin
  v_since := tallybook._first_step(levels.step, levels.since, levels.at);
  return query
  with lanes as materialized (
    select l.lane_id from tallybook.lane l where levels.queue is null or l.queue = levels.queue
  ), now as (
    select coalesce(sum(c.n) filter (where c.what = 'scheduled'), 0) as scheduled,
           coalesce(sum(c.n) filter (where c.what = 'retrying'), 0) as retrying,
           coalesce(sum(c.n) filter (where c.what = 'waiting'), 0) as waiting,
           coalesce(sum(c.n) filter (where c.what in ('available', 'running')), 0) as open,
           coalesce(sum(c.n) filter (where c.what = 'dead'), 0) as dead
      from tallybook._counted() c join lanes l on l.lane_id = c.lane_id
  ), steps as (
    select date_bin(levels.step, s.at, timestamptz '2001-01-01 00:00+00') as begins, s.what, sum(s.n) as n
      from tallybook._series_since(v_since) s join lanes l on l.lane_id = s.lane_id
           where s.what not in ('took', 'waited', 'unclaimed') group by 1, 2
    union all  -- what is not folded yet belongs to the step that is not over
    select date_bin(levels.step, levels.at, timestamptz '2001-01-01 00:00+00'), c.what, sum(c.n)
      from tallybook.fold f, lateral tallybook._changed(f.hi, null, f.holes, '{}') c
           join lanes l on l.lane_id = c.lane_id
     where f.number = (select max(y.number) from tallybook.fold y) and c.what <> 'unclaimed' group by 1, 2
  ), flows as (
    select g.begins, coalesce(sum(s.n) filter (where s.what = 'scheduled'), 0) as scheduled,
           coalesce(sum(s.n) filter (where s.what = 'retrying'), 0) as retrying,
           coalesce(sum(s.n) filter (where s.what = 'waiting'), 0) as waiting,
           coalesce(sum(s.n) filter (where s.what = 'dead'), 0) as dead,
           coalesce(sum(s.n) filter (where s.what = 'opened'), 0)
             - coalesce(sum(s.n) filter (where s.what in ('completed', 'failed', 'snoozed', 'cancelled', 'lost',
                                                          'moved', 'died')), 0) as open,
           coalesce(sum(s.n) filter (where s.what = 'completed'), 0) as completed,
           coalesce(sum(s.n) filter (where s.what = 'failed'), 0) as failed,
           coalesce(sum(s.n) filter (where s.what = 'cancelled'), 0) as cancelled,
           coalesce(sum(s.n) filter (where s.what = 'died'), 0) as died
      -- In seconds: by days it would go by the session's time zone, and miss the steps behind a change of its clocks.
      from generate_series(v_since, levels.at, make_interval(secs => extract(epoch from levels.step)::float8)) g(begins)
           left join steps s on s.begins = g.begins group by g.begins
  )
  select f.begins, (n.scheduled - coalesce(sum(f.scheduled) over later, 0))::bigint,
         (n.retrying - coalesce(sum(f.retrying) over later, 0))::bigint,
         (n.waiting - coalesce(sum(f.waiting) over later, 0))::bigint,
         (n.open - coalesce(sum(f.open) over later, 0))::bigint, (n.dead - coalesce(sum(f.dead) over later, 0))::bigint,
         f.completed::bigint, f.failed::bigint, f.cancelled::bigint, f.died::bigint
    from flows f cross join now n
  window later as (order by f.begins desc rows between unbounded preceding and 1 preceding)
   order by f.begins;
end $$;

-- _first_step(step, since, at): when the first step of a series begins. Errors: TB005.
create or replace function tallybook._first_step(p_step interval, p_since timestamptz,
  p_at timestamptz) returns timestamptz
language plpgsql as $$
begin
  if p_step is null or p_step < interval '1 min' or extract(month from p_step) <> 0 or extract(year from p_step) <> 0
     or extract(epoch from p_step) % 60 <> 0 then
    raise exception 'a step is one minute or more, in whole minutes, not %', coalesce(p_step::text, 'null')
      using errcode = 'TB005', hint = 'Like 1 min, 15 min, 1 h, 1 day.';
  end if;
  p_since := coalesce(p_since, p_at - 60 * p_step);
  if not isfinite(p_since) or extract(epoch from p_at - p_since) / extract(epoch from p_step) > 10000 then
    raise exception 'more than 10,000 steps of % lie between % and %', p_step, p_since, p_at
      using errcode = 'TB005', hint = 'Take a longer step, or a later since.';
  end if;
  return date_bin(p_step, p_since, timestamptz '2001-01-01 00:00+00');
end $$;
