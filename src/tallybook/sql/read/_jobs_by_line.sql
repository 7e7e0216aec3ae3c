-- _jobs_by_line(what, lanes, filter, xid, seq, most, looks): the matching jobs whose newest attempt is in these lanes,
-- last in line first, below this place, at most `most` and one more. Otherwise as _jobs_by_id.
--
--   what   line: not yet claimed; past: up to the cursor; all
--   lanes  null: all
create or replace function tallybook._jobs_by_line(p_what text, p_lanes int[], p_filter jsonb, p_xid xid8, p_seq bigint,
  p_most int, p_looks int)
returns table (place text, line tallybook.job_line, at timestamptz, n int) language plpgsql stable as $$
declare
  v_xid xid8 := coalesce(p_xid, '9223372036854775807'); v_seq bigint := coalesce(p_seq, 0); v_piece int := p_most + 1;
  v_left int := p_looks; v_rows int; v_n int := 0; v_found int; v_at timestamptz; v_xids xid8[]; v_seqs bigint[];
  v_ids bigint[]; v_attempts int[]; v_task text := p_filter ->> 'task';
  v_mine text[] := case when p_filter ? 'unserved' then '{available,unmet}' when p_what = 'line' then '{available}'
    when p_what = 'past' then '{completed,beyond}' else '{available,running,completed,beyond,cancelled,unmet}' end;
  -- The lanes with their last unread entry, the lane with the last of all first; how many are read in one step.
  v_lanes int[]; v_head_xids xid8[]; v_head_seqs bigint[]; v_ways int := 16;
begin
  p_lanes := coalesce(p_lanes, array(select lane_id from tallybook.lane where p_what <> 'line' or retired_at is null));
  -- one look at a lane costs as much as skipping this many
  v_left := greatest(v_left - 10 * cardinality(p_lanes), v_left / 4);
  loop
    -- The last entries of the lanes that have just been read, first of all lanes. One statement, because a list may
    -- read thousands.
    select array_agg(h.lane_id), array_agg(h.xid), array_agg(h.seq) into v_lanes, v_head_xids, v_head_seqs
      from (select l.lane_id, e.xid, e.seq
              from unnest(p_lanes) i(lane_id) join tallybook.lane l on l.lane_id = i.lane_id
              left join lateral (select x.xid, x.seq from tallybook._line_up_to(l.lane_id) x
                                  where p_what = 'past' offset 0) u on true
              left join lateral (select x.xid, x.seq, x.others from tallybook._line_from(l.lane_id) x
                                  where p_what = 'line' offset 0) c on true,
                   -- One bound that the index takes: u itself belongs to it.
                   lateral (select case when (u.xid, u.seq) < (v_xid, v_seq) then u.xid else v_xid end,
                                   case when (u.xid, u.seq) < (v_xid, v_seq) then u.seq + 1 else v_seq end) b(xid, seq),
                   lateral ((select e.xid, e.seq from tallybook.entry e
                              where e.lane_id = l.lane_id and e.retention = l.retention and c.others <> '{}' is not true
                                and (e.xid, e.seq) < (b.xid, b.seq)
                                and (e.xid, e.seq) > (coalesce(c.xid, '0'), coalesce(c.seq, 0))
                              order by e.xid desc, e.seq desc limit 1)
                            union all
                            select r.xid, r.seq from tallybook._line_rows(l.lane_id, p_what, v_xid, v_seq, 1) r
                             where c.others <> '{}') e
            union all
            select * from unnest(v_lanes[v_ways + 1:], v_head_xids[v_ways + 1:], v_head_seqs[v_ways + 1:])
             order by xid desc, seq desc) h;
    exit when v_lanes is null;
    if v_left <= 0 then
      return query select v_xid || '.' || v_seq, null::tallybook.job_line, v_at, v_n + 1;
      return;
    end if;
    -- Entries after the next lane's head are in the first lanes only.
    select count(*), min(u.enqueued_at), array_agg(u.xid) filter (where u.ok), array_agg(u.seq) filter (where u.ok),
           array_agg(u.job_id) filter (where u.ok),
           -- in the order of u
           array_agg(u.attempt) filter (where u.ok), (array_agg(u.xid))[count(*)], (array_agg(u.seq))[count(*)]
      into v_rows, v_at, v_xids, v_seqs, v_ids, v_attempts, v_xid, v_seq
      from (select r.*, (v_task is null or r.task = v_task) and (
                     p_what <> 'past'  -- an entry behind the cursor may be of a job that waits, or runs once more
                     or (select o.state from tallybook.lane l, tallybook.outcome o
                          where l.lane_id = i.lane_id and o.retention = l.retention and o.entry_xid = r.xid
                                and o.entry_seq = r.seq limit 1) = 'completed') as ok
              from unnest(v_lanes[:v_ways]) i(lane_id), lateral tallybook._line_rows(i.lane_id, p_what, v_xid, v_seq,
                  v_piece) r
             where v_lanes[v_ways + 1] is null or (r.xid, r.seq) > (v_head_xids[v_ways + 1], v_head_seqs[v_ways + 1])
             order by r.xid desc, r.seq desc limit v_piece) u;
    return query
    select v_xids[l.nth] || '.' || v_seqs[l.nth], l.line, (l.line).enqueued_at, v_n + row_number() over ()::int
      from tallybook._job_lines(v_ids, v_attempts, null, null, v_mine, p_filter, p_most + 1 - v_n) l;
    get diagnostics v_found = row_count;
    v_n := v_n + v_found;
    exit when v_n > p_most;
    v_left := v_left - case p_what when 'past' then 8 else 3 end * v_rows - 60 * least(v_ways, cardinality(v_lanes))
              - 100 * coalesce(cardinality(v_ids), 0);
    p_lanes := v_lanes[:v_ways];
    v_piece := least(greatest(2 * v_piece, 64), case when cardinality(v_ids) > v_rows / 4 then 256
                     else 4096 end, 16384 / least(v_ways, cardinality(v_lanes)));
  end loop;
end $$;

-- _line_rows(lane, what, xid, seq, most): the last entries of a lane below this place, at most `most`. what: see
-- _jobs_by_line.
--
-- Without "xid <= ...": beside it, a backward scan of PostgreSQL 18 begins at the last entry of that transaction, and
-- not at the row comparison. A transaction can have enqueued a million jobs.
create or replace function tallybook._line_rows(p_lane_id int, p_what text, p_xid xid8, p_seq bigint, p_most int)
returns table (xid xid8, seq bigint, job_id bigint, attempt int, task text, enqueued_at timestamptz)
  language plpgsql stable as $$
declare l tallybook.lane; v record;
begin
  select x.* into l from tallybook.lane x where x.lane_id = p_lane_id;
  if p_what = 'past' then
    select x.xid, x.seq into v from tallybook._line_up_to(p_lane_id) x;
    if (v.xid, v.seq) < (p_xid, p_seq) then p_xid := v.xid; p_seq := v.seq + 1; end if;  -- including the last one
  end if;
  if p_what = 'line' then select * into v from tallybook._line_from(p_lane_id);
  else select '0'::xid8 as xid, 0::bigint as seq, '{}'::xid8[] as others into v; end if;
  return query
  select f.xid, f.seq, f.job_id, f.attempt, f.task, f.enqueued_at from (
    (select e.xid, e.seq, e.job_id, e.attempt, e.task, e.enqueued_at from tallybook.entry e
      where e.lane_id = l.lane_id and e.retention = l.retention and e.xid >= v.xid and (e.xid, e.seq) > (v.xid, v.seq)
            and (e.xid, e.seq) < (p_xid, p_seq)
      order by e.xid desc, e.seq desc limit p_most)
    union all  -- late commits
    (select e.xid, e.seq, e.job_id, e.attempt, e.task, e.enqueued_at
       from (select x from unnest(v.others) x where x < v.xid and x <= p_xid order by x desc) o(xid), lateral (
         select y.* from tallybook.entry y
          where y.lane_id = l.lane_id and y.retention = l.retention and y.xid = o.xid
                and y.seq < case when o.xid < p_xid then 9223372036854775807 else p_seq end
          order by y.seq desc limit p_most) e
      limit p_most)) f
   order by f.xid desc, f.seq desc limit p_most;
end $$;

-- _line_up_to(lane): an upper bound of its cursor: entries behind it are claimed by id or not at all.
create or replace function tallybook._line_up_to(p_lane_id int, out xid xid8, out seq bigint) returns setof record
language sql stable as $$
  select case when l.retired_at is not null then '9223372036854775807' when c.closed = '{}' then c.pos_xid
              else c.lo end, case when l.retired_at is null and c.closed = '{}' then c.pos_seq else 0 end
    from tallybook.lane l, lateral tallybook._cursor_of(l.lane_id) c where l.lane_id = p_lane_id
$$;

-- _line_from(lane): the place from which its cursor claims entries, and the entries before it that it also claims
-- (others). No settings, like the one above, so it is inlined into the calling statement.
create or replace function tallybook._line_from(p_lane_id int, out xid xid8, out seq bigint, out others xid8[])
returns setof record language sql stable as $$
  select case when c.closed || c.holes = '{}' then c.pos_xid else least(c.lo, c.pos_xid) end,
         case when c.closed || c.holes = '{}' then c.pos_seq else 0 end, c.holes || c.closed
    from tallybook._cursor_of(p_lane_id) c
$$;
