-- completed_since(since): how many jobs have completed since then, per queue and task: select sum(completed) from
-- tallybook.completed_since(date_trunc('day', now())) is what was done today. As exact as the steps that are kept: to
-- the second for 15 min, to the minute for two days, then to the hour and the day (tallybook.series_step). Errors:
-- TB005 no since.
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
