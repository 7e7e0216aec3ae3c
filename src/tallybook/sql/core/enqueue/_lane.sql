-- _lane(queue, priority, part): the lane to append to; created if this transaction sees none.
--
-- Never waits: two producers of a new lane create one each (see the table). The newest of several is used. A queue
-- whose retention class was changed has a new lane of that class, and its old lane is drained (see queue_set). Reads
-- lane, queue; writes lane.
create or replace function tallybook._lane(p_queue text, p_priority int, p_part text, out lane_id int,
  out retention "char")
language plpgsql as $$
begin
  select l.lane_id, l.retention into lane_id, retention
    from tallybook.lane l
   where l.queue = p_queue and l.priority = p_priority and l.part = p_part and l.retired_at is null
   order by l.lane_id desc limit 1;
  if found then return; end if;
  perform tallybook._check_name('queue', p_queue, 64);
  if p_priority is null or p_priority not between 0 and 32767 then
    raise exception 'priority % is out of range', p_priority
      using errcode = 'TB005', hint = 'Priorities go from 0 to 32767, lower runs first, 2 is the default.';
  end if;
  insert into tallybook.lane (queue, priority, part, retention, shuffled)
  select p_queue, p_priority::smallint, p_part, coalesce(left(q.retention, 1), 'd')::"char",
         coalesce(q.random_order, false)
    from (select) one left join tallybook.queue q on q.name = p_queue
  returning lane.lane_id, lane.retention into lane_id, retention;
end $$;
