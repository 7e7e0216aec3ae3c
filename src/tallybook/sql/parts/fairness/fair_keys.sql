-- fair_keys(max_keys): list keys of the view fair, for pages: for each queue and priority, the first keys whose jobs
-- wait for their turn, at most max_keys (1 to 1000) in all.
--
-- The cost does not depend on the number of waiting jobs: they are counted up to 1000, which means 1000 or more.
-- Errors: TB005 max_keys out of range. Reads waiting, lane.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook.fair_keys(max_keys int default 100)
returns table (queue text, priority int, fair_key text, waiting bigint) language sql stable as $$
  with recursive k(lane_id, fair_key, looks) as (
    select -1, '' collate "C", tallybook._keys_most(fair_keys.max_keys)
    union all
    select n.lane_id, n.fair_key, k.looks - 1
      from k cross join lateral (
        select w.lane_id, w.fair_key from tallybook.waiting w
         where w.fair_key is not null and (w.lane_id, w.fair_key) > (k.lane_id, k.fair_key)
         order by w.lane_id, w.fair_key limit 1) n
     where k.looks > 0)
  select l.queue, l.priority::int, k.fair_key, (
           select count(*) from (select from tallybook.waiting w
                                  where w.lane_id = k.lane_id and w.fair_key = k.fair_key limit 1000) x)
    from k cross join lateral (select x.* from tallybook.lane x where x.lane_id = k.lane_id limit 1) l
$$;
