-- _lane_beside(lane_id, part): the lane of the same queue, priority and retention class with this part; created at its
-- first use.
create or replace function tallybook._lane_beside(p_lane_id int, p_part text) returns int
language plpgsql as $$
declare l tallybook.lane; v_id int;
begin
  select x.* into strict l from tallybook.lane x where x.lane_id = p_lane_id;
  if l.part = p_part and l.retired_at is null then return p_lane_id; end if;
  -- Of its own class, whatever that of the queue is by now: who asks writes an entry of that class.
  select x.lane_id into v_id from tallybook.lane x
   where x.queue = l.queue and x.priority = l.priority and x.part = p_part and x.retention = l.retention
         and x.retired_at is null
   order by x.lane_id desc limit 1;
  if not found then
    insert into tallybook.lane (queue, priority, part, retention) values (l.queue, l.priority, p_part, l.retention)
      returning lane.lane_id into v_id;
  end if;
  return v_id;
end $$;
