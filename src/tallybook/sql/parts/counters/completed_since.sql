-- completed_since(since): return the number of jobs that have completed since this time, per queue and task. For today:
-- select sum(completed) from tallybook.completed_since(date_trunc('day', now())). It is as precise as the steps that
-- are stored: a second for 15 min, a minute for two days, then an hour and a day (tallybook.series_step). Errors: TB005
-- since is null.
-- Reads series, fold, tally, entry, lane.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.completed_since(since timestamptz) returns table (queue text, task text,
  completed bigint) language sql stable as $$
  select tallybook._refuse(completed_since.since is null, 'completed_since needs to know since when',
                           'Like the beginning of today.');
  select l.queue, x.task, sum(x.n)::bigint
    from tallybook._series_to_now(completed_since.since, null) x join tallybook.lane l on l.lane_id = x.lane_id
   where x.what = 'completed' group by l.queue, x.task having sum(x.n) <> 0
$$;
