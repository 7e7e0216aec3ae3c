-- event_counts(): return the current count of each of your own events, without events whose count is 0. Reads
-- total, series, fold, tally.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook.event_counts() returns table (name text, n bigint, last_at timestamptz)
language sql stable as $$
  select s.task, sum(s.n)::bigint, max(s.last_at)
    from (select * from tallybook._folded_sums() union all select * from tallybook._unfolded()) s
   where s.what = 'event' group by s.task having sum(s.n) <> 0 order by s.task
$$;
