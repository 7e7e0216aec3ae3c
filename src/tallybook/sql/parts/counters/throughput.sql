-- throughput(span, at): return how many jobs came and ended in the last span, per queue and task, in total and per
-- second; since: when the span begins.
--
-- came: the growth in the number of open and dead jobs since then, plus the jobs that ended; it can include retried
-- ones. It counts up to the last fold, which is about a second old if workers run. The beginning of a span of more than
-- 15 min is rounded to the minutes, hours or days that are kept.
-- Errors: TB005 a span that is not positive. Reads series, lane.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.throughput(span interval default '1 min', at timestamptz default clock_timestamp())
returns table (queue text, task text, since timestamptz, came bigint, completed bigint, failed bigint, died bigint,
  cancelled bigint, came_per_s float8, completed_per_s float8, failed_per_s float8) language sql stable as $$
  select tallybook._refuse(coalesce(extract(epoch from span), 0) <= 0,
                           format('a span is a positive time, not %s', coalesce(span::text, 'null')));
  select r.queue, r.task, throughput.at - span, r.came, r.completed, r.failed, r.died, r.cancelled,
         r.came / r.seconds, r.completed / r.seconds, r.failed / r.seconds
    from (select l.queue, x.task, extract(epoch from span)::float8 as seconds,
                 sum(case when x.what in ('opened', 'scheduled', 'retrying', 'waiting', 'dead') then x.n
                          when x.what in ('failed', 'snoozed', 'lost', 'moved', 'died') then -x.n
                          else 0 end)::bigint as came,
                 sum((x.what = 'completed')::int * x.n)::bigint as completed,
                 sum((x.what = 'failed')::int * x.n)::bigint as failed,
                 sum((x.what = 'died')::int * x.n)::bigint as died,
                 sum((x.what = 'cancelled')::int * x.n)::bigint as cancelled
            from tallybook._series_since(throughput.at - span) x join tallybook.lane l on l.lane_id = x.lane_id
           group by l.queue, x.task) r
$$;

-- _series_since(since): the changes since then, of whatever steps they are kept in.
create or replace function tallybook._series_since(p_since timestamptz) returns setof tallybook.series
language sql stable as $$
  select x.* from tallybook.series x where x.step in (0, 60, 3600, 86400) and x.at >= p_since
$$;

-- _series_to_now(since, at): the same with what is not folded yet, which belongs to the step that is not over.
create or replace function tallybook._series_to_now(p_since timestamptz, p_at timestamptz)
returns table (at timestamptz, lane_id int, task text, what tallybook.counted, n bigint)
language sql stable as $$
  select x.at, x.lane_id, x.task, x.what, x.n from tallybook._series_since(p_since) x
  union all select p_at, u.lane_id, u.task, u.what, u.n from tallybook._unfolded() u
$$;
