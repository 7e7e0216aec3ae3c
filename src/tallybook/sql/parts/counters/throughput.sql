-- throughput(span, at): how much came and went, per queue and task, in the last span: since when exactly, and how many
-- per second.
--
-- came: jobs that are in the system now and were not then, and those that ended; they may have been retried ones. Up to
-- the last fold, which is about a second old where workers run. Of a span longer than 15 min the beginning is rounded
-- to the minutes, hours or days that are kept.
-- Errors: TB005 a span that is not positive. Reads series, lane.
-- rights: operator, reader, metrics
create or replace function tallybook.throughput(span interval default '1 min', at timestamptz default clock_timestamp())
returns table (queue text, task text, since timestamptz, came bigint, completed bigint, failed bigint, died bigint,
  cancelled bigint,
               came_per_s float8, completed_per_s float8, failed_per_s float8)
language plpgsql stable
-- profile: hot
as $$
#variable_conflict use_column
declare
  v_since timestamptz := throughput.at - throughput.span; v_seconds float8 := extract(epoch from throughput.span);
begin
  if coalesce(v_seconds, 0) <= 0 then raise exception 'a span is a positive time, not %', coalesce(span::text, 'null')
     using errcode = 'TB005'; end if;
  return query
  select r.queue, r.task, v_since, r.came, r.completed, r.failed, r.died, r.cancelled, r.came / v_seconds,
         r.completed / v_seconds, r.failed / v_seconds
    from (select l.queue, x.task, sum(case when x.what in ('opened', 'scheduled', 'retrying', 'waiting', 'dead')
                                      then x.n
                                           when x.what in ('failed', 'snoozed', 'lost', 'moved', 'died') then -x.n
                                                else 0 end)::bigint as came,
                 coalesce(sum(x.n) filter (where x.what = 'completed'), 0)::bigint as completed,
                 coalesce(sum(x.n) filter (where x.what = 'failed'), 0)::bigint as failed,
                 coalesce(sum(x.n) filter (where x.what = 'died'), 0)::bigint as died,
                 coalesce(sum(x.n) filter (where x.what = 'cancelled'), 0)::bigint as cancelled
            from tallybook._series_since(v_since) x join tallybook.lane l on l.lane_id = x.lane_id
           group by l.queue, x.task) r;
end $$;

-- _series_since(since): the changes since then, of whatever steps they are kept in.
create or replace function tallybook._series_since(p_since timestamptz) returns setof tallybook.series
language plpgsql stable
-- profile: hot
as $$
begin
  return query select x.* from unnest(array[0, 60, 3600, 86400]) s(step), lateral (
    select y.* from tallybook.series y where y.step = s.step and y.at >= p_since) x;
end $$;
