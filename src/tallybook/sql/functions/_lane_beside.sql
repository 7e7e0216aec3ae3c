-- _lane_beside(lane_id, part): the lane of the same queue and priority with this part; made at first use.
create or replace function tallybook._lane_beside(p_lane_id int, p_part text) returns int
language plpgsql as $$
declare
  l tallybook.lane;
begin
  select x.* into strict l from tallybook.lane x where x.lane_id = p_lane_id;
  if l.part = p_part and l.retired_at is null then return p_lane_id; end if;
  return n.lane_id from tallybook._lane(l.queue, l.priority, p_part) n;
end $$;
