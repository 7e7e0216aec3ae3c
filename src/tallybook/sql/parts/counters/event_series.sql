-- event_series(name, step, since, at): return how often an event was counted per time step, without steps whose sum is
-- 0. Steps as in levels. Errors: TB005.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.event_series(name text, step interval default '1 min',
  since timestamptz default null, at timestamptz default clock_timestamp()) returns table (begins timestamptz, n bigint)
language sql stable as $$
  select date_bin(event_series.step, s.at, timestamptz '2001-01-01 00:00+00') as begins, sum(s.n)::bigint
    from tallybook._first_step(event_series.step, event_series.since, event_series.at) first(step),
         lateral tallybook._series_to_now(first.step, event_series.at) s
   where s.what = 'event' and s.task = event_series.name group by 1 having sum(s.n) <> 0 order by 1
$$;
