-- _first_lane(queues, max_jobs, parts, tried): the lane that claim takes from if the first 10 lanes have no work.
--
-- One statement reads the apparent next entry of each lane, in a tenth of the time of _next. Then _next checks the
-- first of them, in claim's order. A cursor of another cluster, or one that drains former holes, comes first; _next
-- handles it.
-- Evaluated from inside out whatever the planner estimates (offset 0). Uses the settings of claim. Reads lane, queue,
-- claim, entry.
create or replace function tallybook._first_lane(p_queues text[], p_max_jobs int[], p_parts text[], p_tried int[],
  out lane_id int, out retention "char", out born xid8, out queue text, out max_jobs int, out xid xid8)
language plpgsql stable as $$
#variable_conflict use_column
begin
  select y.lane_id, y.retention, y.born, y.queue, y.max_jobs, e.xid into lane_id, retention, born, queue, max_jobs, xid
    from (select x.*, (
            select case when h.closed <> '{}' or h.hi > pg_snapshot_xmax(pg_current_snapshot()) then '0'::xid8
                   else coalesce(
                     (select i.xid from tallybook.entry i
                       where i.lane_id = x.lane_id and i.retention = x.retention
                             and i.xid >= coalesce(h.pos_xid, x.born)
                         and (i.xid, i.seq) > (coalesce(h.pos_xid, x.born), coalesce(h.pos_seq, 0))
                       order by i.xid, i.seq limit 1),
                     (select o.xid from unnest(h.holes) o(xid), lateral (
                        select from tallybook.entry i
                         where i.lane_id = x.lane_id and i.retention = x.retention and i.xid = o.xid
                         order by i.seq limit 1) i limit 1)) end
              from (select 1) one left join lateral (
                select c.hi, c.closed, c.holes, c.pos_xid, c.pos_seq from tallybook.claim c
                 where c.lane_id = x.lane_id and c.retention = x.retention order by c.number desc
                       limit 1) h on true) as xid
            from (select l.lane_id, l.retention, l.born, l.queue, l.priority, l.part, n.max_jobs, n.place
                    from unnest(p_queues, p_max_jobs) with ordinality as n(queue, max_jobs, place)
                    join tallybook.lane l on l.queue = n.queue and l.retired_at is null
                    left join tallybook.queue q on q.name = n.queue
                   where n.max_jobs > 0 and (l.part = '' or l.part = any (p_parts)) and q.paused_at is null
                     and l.lane_id <> all (p_tried)) x
           order by x.priority, x.part <> 'turn', xid, x.place offset 0) y,
         lateral (select case when y.xid is not null
                         then tallybook._next(y.lane_id, y.retention, y.born) end as xid) e
   where e.xid is not null limit 1;
end $$;
