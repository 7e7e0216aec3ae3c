-- fair_keys(max_keys): the view fair for pages: the first keys of each queue and priority whose jobs wait for their
-- turn, at most max_keys (1 to 1000) in all.
--
-- Costs the same however many jobs wait: they are counted up to 1000, which is 1000 or more. Errors: TB005 max_keys out
-- of range.
-- Reads waiting, lane.
-- rights: operator, reader
create or replace function tallybook.fair_keys(max_keys int default 100)
returns table (queue text, priority int, fair_key text, waiting bigint) language plpgsql stable
-- profile: lookup
as $$
#variable_conflict use_column
declare
  v_left int := tallybook._keys_most(fair_keys.max_keys); v_lane int := -1; v_key text collate "C";
begin
  while v_left > 0 loop
    select w.lane_id, w.fair_key into v_lane, v_key from tallybook.waiting w
     where w.fair_key is not null and (w.lane_id, w.fair_key) > (v_lane, coalesce(v_key, ''))
           order by w.lane_id, w.fair_key limit 1;
    exit when not found;
    return query
    select l.queue, l.priority::int, v_key::text,
           (select count(*) from (select from tallybook.waiting w where w.lane_id = v_lane and w.fair_key = v_key
                                  limit 1000) x)
      from tallybook.lane l where l.lane_id = v_lane;
    v_left := v_left - 1;
  end loop;
end $$;
