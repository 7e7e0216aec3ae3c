-- _why_behind(...): how many jobs go before one that stands in line, and whether its line is one that nobody walks. For
-- why; part of its answer.
--
-- Counted from the lane's cursor on, as a claim would take them (see _take): former holes first, then the window, then
-- what comes after. Cancelled ones count as well. Reads lane, claim, entry, installation.
create or replace function tallybook._why_behind(p_queue text, p_priority int, p_lane_id int, p_retention "char",
  p_retired boolean, p_xid xid8, p_seq bigint, p_at timestamptz, out reason text, out explanation text,
  out details jsonb, out place int) returns setof record
language plpgsql stable
-- profile: nested
as $$
declare
  c_most constant int := 10000; c record; l record; v_own bigint; v_lower bigint := 0;
begin
  if p_retired or tallybook._is_foreign_cluster(false) then
    place := 0; reason := 'not_rebased'; details := '{}';
    explanation := 'The database has moved to another cluster, and this job is not brought over yet: a worker does '
                   'that as it starts, and every few seconds.';
    return next;
    return;
  end if;
  if p_xid = pg_current_xact_id_if_assigned() then
    place := 1; reason := 'uncommitted'; details := '{}'; explanation :=
      'This very transaction has put it in line, and has not committed.';
    return next;
    return;
  end if;
  select h.lo, h.hi, h.holes, h.closed, h.pos_xid, h.pos_seq into c
    from tallybook.claim h where h.lane_id = p_lane_id and h.retention = p_retention order by h.number desc limit 1;
  if not found then
    select x.born, x.born, x.born into c.lo, c.hi, c.pos_xid from tallybook.lane x where x.lane_id = p_lane_id;
    c.pos_seq := 0; c.holes := '{}'; c.closed := '{}';
  end if;
  v_own := tallybook._before(p_lane_id, p_retention, c.lo, c.hi, c.holes, c.closed, c.pos_xid, c.pos_seq, p_xid, p_seq,
                             c_most);
  if p_xid = any (c.holes) then
    place := 2; reason := 'late_commit'; details := jsonb_build_object('transaction', p_xid::text, 'before', v_own);
    explanation := format('Its transaction committed after its line had moved on: it is taken with the next part of '
                          'it, after %s.', tallybook._others(v_own, c_most));
    return next;
    return;
  end if;
  for l in select x.lane_id, x.retention, x.born from tallybook.lane x
            where x.queue = p_queue and x.priority < p_priority and x.part in ('', 'turn', 'fair')
                  and x.retired_at is null
            order by x.priority, x.lane_id limit 50 loop
    exit when v_lower >= c_most;
    v_lower := v_lower + tallybook._in_line(l.lane_id, l.retention, l.born, c_most - v_lower::int);
  end loop;
  if v_own + v_lower > 0 then
    place := 3; reason := 'behind';
    details := jsonb_strip_nulls(jsonb_build_object('before', v_own, 'of_lower_priority', v_lower, 'priority',
                                                    p_priority, 'more', case when greatest(v_own, v_lower) >= c_most
                                                    then true end));
    explanation := format('It is behind %s in its line', tallybook._others(v_own, c_most))
      || case when v_lower > 0 then format(', and behind %s in its queue whose priority number is lower than its %s',
                                           tallybook._others(v_lower, c_most), p_priority) else '' end || '.';
    return next;
  end if;
end $$;

-- _before(lane, ..., xid, seq, most): how many entries a claim takes before this one, from where its lane's cursor is.
create or replace function tallybook._before(p_lane_id int, p_retention "char", p_lo xid8, p_hi xid8, p_holes xid8[],
  p_closed xid8[], p_pos_xid xid8, p_pos_seq bigint, p_xid xid8, p_seq bigint, p_most int) returns bigint
language plpgsql stable
-- profile: nested
as $$
declare
  v_n bigint := 0; v_hole boolean := p_xid = any (p_holes); v_late boolean := p_xid = any (p_closed);
  v_new boolean := p_xid >= p_hi;
  v_from_xid xid8 := p_pos_xid; v_from_seq bigint := p_pos_seq; v_to_xid xid8 := p_xid; v_to_seq bigint := p_seq;
begin
  if p_closed <> '{}' then  -- former holes, which are drained first
    select count(*) into v_n from (
      select from unnest(p_closed) x(xid), lateral (
        select from tallybook.entry e where e.lane_id = p_lane_id and e.retention = p_retention and e.xid = x.xid
           and (e.xid, e.seq) > (p_pos_xid, p_pos_seq) and (not v_late or (e.xid, e.seq) < (p_xid, p_seq))
               order by e.seq limit p_most) e
      limit p_most) n;
    if v_late then return v_n; end if;
    v_from_xid := p_lo; v_from_seq := 0;
  end if;
  if v_hole or v_new then  -- those of earlier holes that have committed since, with the next window
    select v_n + count(*) into v_n from (
      select from unnest(p_holes) x(xid), lateral (
        select from tallybook.entry e where e.lane_id = p_lane_id and e.retention = p_retention and e.xid = x.xid
           and (v_new or (e.xid, e.seq) < (p_xid, p_seq)) order by e.seq limit p_most) e
      limit p_most) n;
    if v_hole then v_to_xid := p_hi; v_to_seq := 0; end if;
  end if;
  return v_n + (select count(*) from (
    select from tallybook.entry e
     where e.lane_id = p_lane_id and e.retention = p_retention
       and e.xid >= v_from_xid and (e.xid, e.seq) > (v_from_xid, v_from_seq) and e.xid <= v_to_xid
           and (e.xid, e.seq) < (v_to_xid, v_to_seq)
       and e.xid <> all (p_holes)
     order by e.xid, e.seq limit p_most) n);
end $$;
