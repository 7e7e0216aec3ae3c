-- levels(step, since, queue, at): return the counters as a time series: for each step, how many jobs ended in it and
-- how many were in each state at its end, in all queues or in one.
--
-- Each point is computed from the current numbers by subtracting all later changes, so it is exact at the end of its
-- step. The last step has not ended: its point shows the present.
--   step   whole minutes. Where only longer steps are stored (series_step), changes are shown at the
--          beginning of those
--   since  the first step is the one that contains this time; null: 60 steps ago
-- Errors: TB005 a step that is not a whole number of minutes, more than 10,000 steps. Reads what counts reads, and
-- series.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.levels(step interval default '1 min', since timestamptz default null,
  queue text default null, at timestamptz default clock_timestamp(), out begins timestamptz, out scheduled bigint,
  out retrying bigint, out waiting bigint, out open bigint, out dead bigint, out completed bigint, out failed bigint,
  out cancelled bigint, out died bigint)
returns setof record language plpgsql stable as $$
declare v_since timestamptz := tallybook._first_step(levels.step, levels.since, levels.at);
begin
  return query
  with lanes as materialized (
    select l.lane_id from tallybook.lane l where levels.queue is null or l.queue = levels.queue
  ), changes as (
    select date_bin(levels.step, s.at, timestamptz '2001-01-01 00:00+00') as begins, s.what::text as what, sum(s.n) as n
      from tallybook._series_to_now(v_since, levels.at) s join lanes l on l.lane_id = s.lane_id group by 1, 2
    union all  -- what there is now is what all steps together take back
    select 'infinity', case c.what when 'available' then 'opened' when 'running' then 'opened' else c.what end, -c.n
      from tallybook._counted_of(levels.queue) c
     where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead')
    union all select 'infinity', '', 0
    union all  -- in seconds: by days it would go by the session's time zone, and miss steps where its clocks change
    select generate_series(v_since, levels.at, make_interval(secs => extract(epoch from levels.step)::float8)), '', 0
  )
  select x.* from (
    select s.begins, (-sum(sum((s.what = 'scheduled')::int * s.n)) over later)::bigint,
           (-sum(sum((s.what = 'retrying')::int * s.n)) over later)::bigint,
           (-sum(sum((s.what = 'waiting')::int * s.n)) over later)::bigint,
           (-sum(sum(case when s.what = 'opened' then s.n
                          when s.what in ('completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'died')
                          then -s.n else 0 end)) over later)::bigint,
           (-sum(sum((s.what = 'dead')::int * s.n)) over later)::bigint,
           sum((s.what = 'completed')::int * s.n)::bigint, sum((s.what = 'failed')::int * s.n)::bigint,
           sum((s.what = 'cancelled')::int * s.n)::bigint, sum((s.what = 'died')::int * s.n)::bigint
      from changes s where s.begins <= levels.at or s.begins = 'infinity' group by s.begins
    window later as (order by s.begins desc rows between unbounded preceding and 1 preceding)) x
   where x.begins < 'infinity' order by x.begins;
end $$;

-- _first_step(step, since, at): when the first step of a series begins. Errors: TB005.
create or replace function tallybook._first_step(p_step interval, p_since timestamptz,
  p_at timestamptz) returns timestamptz
language plpgsql as $$
begin
  perform tallybook._refuse(coalesce(p_step < interval '1 min' or extract(month from p_step) <> 0
                                     or extract(year from p_step) <> 0 or extract(epoch from p_step) % 60 <> 0, true),
    format('a step is one minute or more, in whole minutes, not %s', coalesce(p_step::text, 'null')),
    'Like 1 min, 15 min, 1 h, 1 day.');
  p_since := coalesce(p_since, p_at - 60 * p_step);
  perform tallybook._refuse(
    not isfinite(p_since) or extract(epoch from p_at - p_since) / extract(epoch from p_step) > 10000,
    format('more than 10,000 steps of %s lie between %s and %s', p_step, p_since, p_at),
    'Take a longer step, or a later since.');
  return date_bin(p_step, p_since, timestamptz '2001-01-01 00:00+00');
end $$;
