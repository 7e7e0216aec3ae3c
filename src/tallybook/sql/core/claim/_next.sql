-- _next(lane_id, retention, born): the transaction id of the entry that this lane's next claim would take, or null.
--
-- Runs without a lock before any lock is taken, so an idle lane is never locked. Reads claim, entry.
create or replace function tallybook._next(p_lane_id int, p_retention "char", p_born xid8) returns xid8
language plpgsql stable as $$
declare
  c record; v_xid xid8; v_snap pg_snapshot := pg_current_snapshot(); v_own xid8 := pg_current_xact_id_if_assigned();
  v_busy xid8[];
begin
  select h.lo, h.hi, h.holes, h.closed, h.pos_xid, h.pos_seq into c
    from tallybook.claim h where h.lane_id = p_lane_id and h.retention = p_retention order by h.number desc limit 1;
  if not found then
    c.hi := '0'; c.pos_xid := p_born; c.pos_seq := 0; c.holes := '{}'; c.closed := '{}';
  end if;
  if c.hi > pg_snapshot_xmax(v_snap) then  -- in one cluster no claim is ahead of who sees it
    raise exception 'the cursor of lane % is of another cluster', p_lane_id
      using errcode = 'TB004', detail = format('It is at transaction %s, this cluster is at %s.', c.hi,
                                               pg_snapshot_xmax(v_snap)),
            hint = 'This database was restored or moved: its lanes have to be rebased.';
  end if;
  if c.closed <> '{}' then
    -- One by one: given a list, a plan from an empty table reads all of the lane and looks in the list afterwards.
    select e.xid into v_xid from unnest(c.closed) x(xid), lateral (
             select e.xid from tallybook.entry e
              where e.lane_id = p_lane_id and e.retention = p_retention and e.xid = x.xid
                and (e.xid, e.seq) > (c.pos_xid, c.pos_seq) order by e.seq limit 1) e limit 1;
    if found then return v_xid; end if;
    c.pos_xid := c.lo; c.pos_seq := 0;
  end if;
  -- Between the transactions that are still running (and one's own, which no claim of its takes): never over their
  -- entries. Mostly there are none, and a plain look costs a third.
  if v_own is null and pg_snapshot_xmin(v_snap) = pg_snapshot_xmax(v_snap) then
    select e.xid into v_xid from tallybook.entry e
     where e.lane_id = p_lane_id and e.retention = p_retention
       and e.xid >= c.pos_xid and (e.xid, e.seq) > (c.pos_xid, c.pos_seq) and e.xid < pg_snapshot_xmax(v_snap)
     order by e.xid, e.seq limit 1;
    if found or c.holes = '{}' then return v_xid; end if;
  end if;
  v_busy := array(select x from (select x from pg_snapshot_xip(v_snap) x union select v_own) b
                   where x >= c.pos_xid and x < pg_snapshot_xmax(v_snap) order by x);
  select e.xid into v_xid
    from (select a as after, coalesce(lead(a) over (order by n), pg_snapshot_xmax(v_snap)) as before, n
            from unnest(c.pos_xid || v_busy) with ordinality u(a, n)) r,
         lateral (select e.xid, e.seq from tallybook.entry e
                   where e.lane_id = p_lane_id and e.retention = p_retention
                     and e.xid >= r.after and (e.xid, e.seq) > (r.after, case when r.n = 1 then c.pos_seq
                                                                else 9223372036854775807 end)
                     and e.xid < r.before
                   order by e.xid, e.seq limit 1) e
   limit 1;
  if found then return v_xid; end if;
  if c.holes <> '{}' then
    select e.xid into v_xid from unnest(c.holes) x(xid), lateral (
             select e.xid from tallybook.entry e
              where e.lane_id = p_lane_id and e.retention = p_retention and e.xid = x.xid order by e.seq limit 1) e
     where pg_visible_in_snapshot(x.xid, v_snap) and x.xid is distinct from v_own limit 1;
  end if;
  return v_xid;
end $$;
