-- completed_since(since): how many jobs have completed since then, per queue and task: select sum(completed) from
-- tallybook.completed_since(date_trunc('day', now())) is what was done today. As exact as the steps that are kept: to
-- the second for 15 min, to the minute for two days, then to the hour and the day (tallybook.series_step). Errors:
-- TB005 no since.
-- rights: operator, reader, metrics
create or replace function tallybook.completed_since(since timestamptz) returns table (queue text, task text,
  completed bigint)
language plpgsql stable
-- profile: hot
as $$
#variable_conflict use_column
begin
  if completed_since.since is null then
    raise exception 'completed_since needs to know since when' using errcode = 'TB005',
      hint = 'Like the beginning of today.';
  end if;
  return query
  select l.queue, x.task, sum(x.n)::bigint
    from (select s.lane_id, s.task, s.n from tallybook._series_since(completed_since.since) s where s.what = 'completed'
          union all
          select c.lane_id, c.task, c.n from tallybook.fold f, lateral tallybook._changed(f.hi, null, f.holes, '{}') c
           where c.what = 'completed' and f.number = (select max(y.number) from tallybook.fold y)) x
    join tallybook.lane l on l.lane_id = x.lane_id
   group by l.queue, x.task having sum(x.n) <> 0;
end $$;
