-- timings(span, at): return how long jobs waited and ran, per queue and task: percentiles of those that completed in
-- the last span, in milliseconds.
--
-- took is from claim to end, waited from the time when a job could run to its claim. They come from histograms with
-- buckets a quarter of an octave wide: a percentile is the upper end of its bucket, at most 19 % too high. It counts up
-- to the last fold. Errors: TB005 a span that is not positive. Reads series, lane.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.timings(span interval default '15 min', at timestamptz default clock_timestamp())
returns table (queue text, task text, jobs bigint, waited_p50 float8, waited_p95 float8, waited_p99 float8,
  took_p50 float8, took_p95 float8, took_p99 float8) language sql stable as $$
  select tallybook._refuse(span is null or span <= interval '0',
                           format('a span is a positive time, not %s', coalesce(span::text, 'null')));
  with b as (
    select l.queue, x.task, x.what, x.bucket, sum(x.n) as n
      from tallybook._series_since(timings.at - span) x join tallybook.lane l on l.lane_id = x.lane_id
     where x.what in ('took', 'waited') group by l.queue, x.task, x.what, x.bucket
  ), c as (
    select b.queue, b.task, b.what = 'took' as took, 2.0::float8 ^ (b.bucket / 4.0::float8) as ms,
           sum(b.n) over w as whole, sum(b.n) over (w order by b.bucket) / sum(b.n) over w as part
      from b window w as (partition by b.queue, b.task, b.what)
  )
  select c.queue, c.task, max(c.whole)::bigint, min(c.ms) filter (where not c.took and c.part >= 0.50),
         min(c.ms) filter (where not c.took and c.part >= 0.95), min(c.ms) filter (where not c.took and c.part >= 0.99),
         min(c.ms) filter (where c.took and c.part >= 0.50), min(c.ms) filter (where c.took and c.part >= 0.95),
         min(c.ms) filter (where c.took and c.part >= 0.99)
    from c group by c.queue, c.task
$$;
