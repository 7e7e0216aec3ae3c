-- event_counts(): how often each of your own events was counted, to this moment. Reads total, series, fold, tally.
-- rights: operator, reader, metrics
create or replace function tallybook.event_counts() returns table (name text, n bigint, last_at timestamptz)
language plpgsql stable
-- profile: hot
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
