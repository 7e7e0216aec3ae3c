-- _cursor_passed(lane_id, retention, xid, seq): whether the lane's cursor has passed an entry.
--
-- Ignores entries that were claimed by id before the cursor reached them; those have a tombstone of kind taken.
-- profile: lookup
create or replace function tallybook._cursor_passed(p_lane_id int, p_retention "char", p_xid xid8, p_seq bigint)
returns boolean language plpgsql stable as $$
begin
  return coalesce((
    select case
             when p_xid >= c.hi or p_xid = any (c.holes) then false
             when c.closed = '{}' then p_xid < c.lo or (p_xid, p_seq) <= (c.pos_xid, c.pos_seq)
             when p_xid = any (c.closed) then (p_xid, p_seq) <= (c.pos_xid, c.pos_seq)
             else p_xid < c.lo
           end
      from tallybook.claim c
     where c.lane_id = p_lane_id and c.retention = p_retention
     order by c.number desc limit 1), false);
end $$;
