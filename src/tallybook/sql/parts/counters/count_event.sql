-- count_event(name, n): count something of your own, in your transaction: rolled back, and it did not happen. One small row is appended; nobody
-- waits for anybody, however many count the same name. Read it with event_counts() and event_series().
-- Errors: TB005 a name that is empty or longer than 200 bytes, an n that is 0. Writes tally.
create or replace function tallybook.count_event(name text, n int default 1) returns void
language plpgsql as $$
begin
  perform tallybook._check_name('event', name, 200);
  if coalesce(n, 0) = 0 then
    raise exception 'an event is counted by a number other than 0' using errcode = 'TB005', hint = 'A negative one takes back what was counted.';
  end if;
  insert into tallybook.tally (n, what, task) values (count_event.n, 'event', count_event.name);
end $$;

-- event_counts(): how often each of your own events was counted, to this moment. Reads total, series, fold, tally.
create or replace function tallybook.event_counts() returns table (name text, n bigint, last_at timestamptz)
language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
#variable_conflict use_column
begin
  return query
  select s.task, sum(s.n)::bigint, max(s.last_at)
    from (select x.task, x.n, x.last_at from tallybook._folded_sums() x where x.what = 'event'
          union all
          select c.task, c.n, f.folded_at from tallybook.fold f, lateral tallybook._changed(f.hi, null, f.holes, '{}') c
           where c.what = 'event' and f.number = (select max(y.number) from tallybook.fold y)) s
   group by s.task order by s.task;
end $$;

-- event_series(name, step, since, at): how often an event was counted, per step of time in which it was. Steps as in levels. Errors: TB005.
create or replace function tallybook.event_series(name text, step interval default '1 min', since timestamptz default null,
  at timestamptz default clock_timestamp()) returns table (begins timestamptz, n bigint)
language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
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
           where c.what = 'event' and c.task = event_series.name and f.number = (select max(y.number) from tallybook.fold y)) s
   group by 1 having sum(s.n) <> 0 order by 1;
end $$;
