-- _lanes(queues, priorities): the lane to append to and its retention class, for each of many jobs, in the given order.
-- The default priority is 2. Looks up each lane once, not once per job; see _lane.
create or replace function tallybook._lanes(p_queues text[], p_priorities int[], out lanes int[],
  out retentions "char"[])
language plpgsql as $$
declare v_n int := cardinality(p_queues);
begin
  if (select count(*) from (select distinct * from unnest(p_queues, p_priorities)) d) = 1 then
    select array_fill(l.lane_id, array[v_n]), array_fill(l.retention, array[v_n]) into lanes, retentions
      from tallybook._lane(p_queues[1], coalesce(p_priorities[1], 2), '') l;
    return;
  end if;
  with found as materialized (
    select d.queue, d.priority, l.* from (select distinct f.queue, coalesce(f.priority, 2)
                                          from unnest(p_queues, p_priorities) f(queue, priority))
      as d(queue, priority), tallybook._lane(d.queue, d.priority, '') l)
  select array_agg(l.lane_id order by f.n), array_agg(l.retention order by f.n) into lanes, retentions
    from unnest(p_queues, p_priorities) with ordinality f(queue, priority, n)
    join found l on l.queue = f.queue and l.priority = coalesce(f.priority, 2);
end $$;
