-- event_series(name, step, since, at): how often an event was counted, per step of time in which it was. Steps as in
-- levels. Errors: TB005.
-- rights: operator, reader, metrics
create or replace function tallybook.event_series(name text, step interval default '1 min',
  since timestamptz default null, at timestamptz default clock_timestamp()) returns table (begins timestamptz, n bigint)
language plpgsql stable
-- profile: hot
as $$
#variable_conflict use_column
declare
  v_since timestamptz := tallybook._first_step(event_series.step, event_series.since, event_series.at);
begin
  return query
  select date_bin(event_series.step, s.at, timestamptz '2001-01-01 00:00+00') as begins, sum(s.n)::bigint
    from (select x.at, x.n from tallybook._series_since(v_since) x where x.what = 'event' and x.task = event_series.name
          union all  -- what is not folded yet belongs to the step that is not over
          select event_series.at, c.n from tallybook.fold f, lateral tallybook._changed(f.hi, null, f.holes, '{}') c
           where c.what = 'event' and c.task = event_series.name
                 and f.number = (select max(y.number) from tallybook.fold y)) s
   group by 1 having sum(s.n) <> 0 order by 1;
end $$;
