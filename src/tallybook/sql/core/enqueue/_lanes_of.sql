-- _lanes_of(queues, priorities): the lane to append to and its retention class, for each of many jobs, in the given
-- order; shuffled: whether one of the lanes is in random order (see _shuffled_many).
-- The default priority is 2. Looks up each lane once, not once per job; see _lane.
create or replace function tallybook._lanes_of(p_queues text[], p_priorities int[], out lanes int[],
  out retentions "char"[], out shuffled boolean)
language plpgsql as $$
declare v_n int := cardinality(p_queues); v_lane int; v_retention "char";
begin
  if (select count(*) from (select distinct * from unnest(p_queues, p_priorities)) d) = 1 then
    select l.lane_id, l.retention, l.shuffled into v_lane, v_retention, shuffled
      from tallybook.lane l
     where l.queue = p_queues[1] and l.priority = coalesce(p_priorities[1], 2) and l.part = '' and l.retired_at is null
     order by l.lane_id desc limit 1;
    if not found then
      select l.lane_id, l.retention into v_lane, v_retention
        from tallybook._lane(p_queues[1], coalesce(p_priorities[1], 2), '') l;
    end if;
    lanes := array_fill(v_lane, array[v_n]); retentions := array_fill(v_retention, array[v_n]);
    if shuffled is not null then return; end if;
  else
    with found as materialized (
      select d.queue, d.priority, l.* from (select distinct f.queue, coalesce(f.priority, 2)
                                            from unnest(p_queues, p_priorities) f(queue, priority))
        as d(queue, priority), tallybook._lane(d.queue, d.priority, '') l)
    select array_agg(l.lane_id order by f.n), array_agg(l.retention order by f.n) into lanes, retentions
      from unnest(p_queues, p_priorities) with ordinality f(queue, priority, n)
      join found l on l.queue = f.queue and l.priority = coalesce(f.priority, 2);
  end if;
  shuffled := exists (select from tallybook.lane l where l.shuffled and l.lane_id = any (lanes));
end $$;
