-- timings(span, at): how long jobs waited and took, per queue and task: percentiles of those that completed in the last
-- span, in milliseconds.
--
-- took is from claim to end, waited from when a job could run to its claim. Out of histograms with buckets a quarter of
-- an octave wide: a percentile is the upper end of its bucket, at most 19 % too high. Up to the last fold. Errors:
-- TB005 a span that is not positive. Reads series, lane.
-- rights: operator, reader, metrics
create or replace function tallybook.timings(span interval default '15 min', at timestamptz default clock_timestamp())
returns table (queue text, task text, jobs bigint, waited_p50 float8, waited_p95 float8, waited_p99 float8,
  took_p50 float8, took_p95 float8, took_p99 float8)
language plpgsql stable
-- profile: hot
as $$
#variable_conflict use_column
begin
  if timings.span is null or timings.span <= interval '0' then
    raise exception 'a span is a positive time, not %', coalesce(timings.span::text, 'null') using errcode = 'TB005';
  end if;
  return query
  with b as (
    select l.queue, x.task, x.what, x.bucket, sum(x.n) as n
      from tallybook._series_since(timings.at - timings.span) x join tallybook.lane l on l.lane_id = x.lane_id
     where x.what in ('took', 'waited') group by l.queue, x.task, x.what, x.bucket
  ), c as (
    select b.queue, b.task, b.what, tallybook._bucket_ms(b.bucket) as ms, b.n, sum(b.n) over w as upto,
           sum(b.n) over (partition by b.queue, b.task, b.what) as whole
      from b window w as (partition by b.queue, b.task, b.what order by b.bucket)
  )
  select c.queue, c.task, max(c.whole)::bigint, min(c.ms) filter (where c.what = 'waited' and c.upto >= 0.50 * c.whole),
         min(c.ms) filter (where c.what = 'waited' and c.upto >= 0.95 * c.whole),
         min(c.ms) filter (where c.what = 'waited' and c.upto >= 0.99 * c.whole),
         min(c.ms) filter (where c.what = 'took' and c.upto >= 0.50 * c.whole),
         min(c.ms) filter (where c.what = 'took' and c.upto >= 0.95 * c.whole),
         min(c.ms) filter (where c.what = 'took' and c.upto >= 0.99 * c.whole)
    from c group by c.queue, c.task;
end $$;

-- _bucket_ms(bucket): the upper end of a bucket, in milliseconds.
create or replace function tallybook._bucket_ms(p_bucket int) returns float8
language sql immutable as $$ select 2.0::float8 ^ (p_bucket / 4.0::float8) $$;
