-- _line_entries(lane): the entries of a lane that its cursor has not passed, in no order; phase: see _line_ranges.
-- Includes entries that are cancelled or were claimed by id.
--
-- Like the functions below it has no settings of its own, so that it is inlined into the calling statement.
create or replace function tallybook._line_entries(p_lane_id int)
returns table (phase int, lane_id int, retention "char", xid xid8, seq bigint, job_id bigint, attempt int, task text,
  args jsonb, unique_key text, order_key text)
language sql stable as $$
  select r.phase, e.lane_id, e.retention, e.xid, e.seq, e.job_id, e.attempt, e.task, e.args, e.unique_key, e.order_key
    from tallybook._line_ranges(p_lane_id) r, lateral (  -- range by range: a join may read all of the lane
      select * from tallybook.entry x
       where x.lane_id = r.lane_id and x.retention = r.retention
         and x.xid >= r.from_xid and (x.xid, x.seq) > (r.from_xid, r.from_seq)
         and x.xid <= r.to_xid and (x.xid, x.seq) < (r.to_xid, r.to_seq) and x.xid <> all (r.holes) offset 0) e
$$;

-- _line_ranges(lane): where those entries are, in the order in which claims will take them (see _take): ranges between
-- two places of the line, without holes.
--
--   phase  0: a former hole, one row each; 1: the window, and all behind it if nothing comes in between; 2: entries
--          that a hole has committed since, one row each; 3: entries of the next window
create or replace function tallybook._line_ranges(p_lane_id int)
returns table (lane_id int, retention "char", phase int, from_xid xid8, from_seq bigint, to_xid xid8, to_seq bigint,
  holes xid8[])
language sql stable as $$
  select c.lane_id, c.retention, r.*
    from tallybook._cursor_of(p_lane_id) c cross join lateral (
      select 0, x, case when x = c.pos_xid then c.pos_seq else 0 end, x, 9223372036854775807, '{}'::xid8[]
        from unnest(c.closed) x where x >= c.pos_xid
      union all
      select 1, case when c.closed = '{}' then c.pos_xid else c.lo end,
             case when c.closed = '{}' then c.pos_seq else 0 end,
             case when c.holes = '{}' then '18446744073709551615' else c.hi end, 0, c.holes
      union all
      select 2, x, 0, x, 9223372036854775807, '{}' from unnest(c.holes) x
      union all
      select 3, c.hi, 0, '18446744073709551615', 0, '{}' where c.holes <> '{}') r
$$;

-- _cursor_of(lane): the position of its cursor: its newest claim, or the lane's beginning. claimed: how many jobs the
-- lane has handed out.
create or replace function tallybook._cursor_of(p_lane_id int, out lane_id int, out retention "char", out lo xid8,
  out hi xid8, out holes xid8[], out closed xid8[], out pos_xid xid8, out pos_seq bigint, out claimed bigint)
returns setof record language sql stable as $$
  select l.lane_id, l.retention, coalesce(h.lo, l.born), coalesce(h.hi, l.born), coalesce(h.holes, '{}'),
         coalesce(h.closed, '{}'), coalesce(h.pos_xid, l.born), coalesce(h.pos_seq, 0), coalesce(h.claimed, 0)
    from tallybook.lane l left join lateral (
      select k.lo, k.hi, k.holes, k.closed, k.pos_xid, k.pos_seq, k.claimed from tallybook.claim k
       where k.lane_id = l.lane_id and k.retention = l.retention order by k.number desc limit 1) h on true
   where l.lane_id = p_lane_id
$$;
