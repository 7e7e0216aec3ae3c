-- _take(lane, ...): move a lane's cursor over the next entries and append the claim. The heart of the ledger; see
-- sql/README.md.
--
-- The caller holds the lane's lock, taken in an earlier statement, and runs at READ COMMITTED, so each statement here
-- has a newer snapshot than the last committed claim of this lane. Filters on holes only if there are holes from lo on.
-- Uses the settings of claim.
--   p_next   what _next saw; the line is empty up to there, however far the cursor has moved since
--   p_error  set by queue_truncate: the jobs that it meets end as cancelled with this error, and jobs is their number
create or replace function tallybook._take(p_lane_id int, p_retention "char", p_born xid8, p_max int, p_worker int,
  p_lease uuid, p_next xid8, p_at timestamptz default clock_timestamp(), p_error jsonb default null,
  out claim_id bigint, out jobs int)
language plpgsql as $$
declare
  h tallybook.claim; v_from_xid xid8; v_from_seq bigint;
  v_xids xid8[]; v_seqs bigint[]; v_ids bigint[]; v_skipped bigint[]; v_holes xid8[]; k int;
begin
  jobs := 0;
  select c.* into h from tallybook.claim c
   where c.lane_id = p_lane_id and c.retention = p_retention order by c.number desc limit 1;
  if not found then
    h.lane_id := p_lane_id; h.number := 0; h.lo := p_born; h.hi := p_born; h.holes := '{}'; h.closed := '{}';
    h.pos_xid := p_born; h.pos_seq := 0; h.claimed := 0;
  end if;
  for turn in 1..64 loop
    -- 1. What is next: the former holes that have ended, else the window, else a new window.
    for opened in 0..1 loop
      if h.closed <> '{}' then
        select array_agg(e.xid), array_agg(e.seq), array_agg(e.job_id) into v_xids, v_seqs, v_ids
          from (select e.xid, e.seq, e.job_id from unnest(h.closed) x(xid), lateral (
                  select e.xid, e.seq, e.job_id from tallybook.entry e
                   where e.lane_id = p_lane_id and e.retention = p_retention and e.xid = x.xid
                     and (e.xid, e.seq) > (h.pos_xid, h.pos_seq) order by e.seq limit p_max) e limit p_max) e;
        exit when v_ids is not null;
        h.closed := '{}'; h.pos_xid := h.lo; h.pos_seq := 0;
      end if;
      v_holes := h.holes;
      if v_holes <> '{}' then v_holes := array(select x from unnest(h.holes) x where x >= h.lo); end if;
      if p_next >= h.hi and turn = 1 and opened = 0 and p_next is distinct from pg_current_xact_id_if_assigned() then
        v_ids := null;  -- the look without the lock saw that nothing of this window is left
      elsif v_holes = '{}' then
        select array_agg(e.xid), array_agg(e.seq), array_agg(e.job_id) into v_xids, v_seqs, v_ids
          from (select e.xid, e.seq, e.job_id from tallybook.entry e
                 where e.lane_id = p_lane_id and e.retention = p_retention
                   and e.xid >= h.pos_xid and (e.xid, e.seq) > (h.pos_xid, h.pos_seq) and e.xid < h.hi
                 order by e.xid, e.seq limit p_max) e;
      else
        select array_agg(e.xid), array_agg(e.seq), array_agg(e.job_id) into v_xids, v_seqs, v_ids
          from (select e.xid, e.seq, e.job_id from tallybook.entry e
                 where e.lane_id = p_lane_id and e.retention = p_retention
                   and e.xid >= h.pos_xid and (e.xid, e.seq) > (h.pos_xid, h.pos_seq) and e.xid < h.hi
                   and e.xid <> all (v_holes)
                 order by e.xid, e.seq limit p_max) e;
      end if;
      exit when v_ids is not null or opened = 1;
      h := tallybook._window(h);
    end loop;
    exit when v_ids is null;

    -- 2. What of it was cancelled, or taken by id, in a transaction that has committed.
    k := cardinality(v_ids);
    v_from_xid := h.pos_xid; v_from_seq := h.pos_seq;
    h.pos_xid := v_xids[k]; h.pos_seq := v_seqs[k]; v_skipped := '{}';
    if p_error is not null then  -- truncated: whatever nobody has taken ends here, and is handed to nobody
      select t.ended, t.skipped into jobs, v_skipped from tallybook._truncate_line(p_lane_id, p_retention, v_xids,
          v_seqs, p_error, p_at) t;
      k := 0;
    elsif exists (select from tallybook.tombstone t where t.job_id = any (v_ids)) then
      v_skipped := tallybook._skip(p_lane_id, p_retention, v_xids, v_seqs, p_at);
      k := k - cardinality(v_skipped);
    end if;

    -- 3. The claim, and with it the new cursor.
    claim_id := nextval('tallybook.claim_id');
    h.number := h.number + 1; h.claimed := h.claimed + k;
    insert into tallybook.claim (id, number, lo, hi, from_xid, from_seq, pos_xid, pos_seq, claimed, claimed_at, lease,
                                 lane_id, worker_id, jobs, retention, holes, closed, skipped)
    values (claim_id, h.number, h.lo, h.hi, v_from_xid, v_from_seq, h.pos_xid, h.pos_seq, h.claimed, p_at,
            case when k > 0 then p_lease end, p_lane_id, case when k > 0
                 then p_worker end, k, p_retention, h.holes, h.closed, v_skipped);
    jobs := jobs + k;
    exit when k > 0 or p_error is not null;  -- else all of the batch was skipped: continue behind it
  end loop;
end $$;

-- _window(cursor): a lane's cursor at the beginning of a new window: all transactions from the end of the last window
-- to the newest known one. Former holes that have ended are closed and come first.
-- Errors: TB004 the cursor is of another cluster.
create or replace function tallybook._window(h tallybook.claim) returns tallybook.claim
language plpgsql as $$
declare
  -- The caller's own transaction is never listed as running: it is always a hole.
  s pg_snapshot := pg_current_snapshot(); v_own xid8 := pg_current_xact_id_if_assigned(); v_old_hi xid8 := h.hi;
begin
  if pg_snapshot_xmax(s) < h.hi then
    raise exception 'the cursor of lane % is of another cluster', h.lane_id
      using errcode = 'TB004', detail = format('It is at transaction %s, this cluster is at %s.', h.hi,
                                               pg_snapshot_xmax(s)),
            hint = 'This database was restored or moved: its lanes have to be rebased.';
  end if;
  if h.holes <> '{}' or pg_snapshot_xmin(s) <> pg_snapshot_xmax(s) or v_own is not null then
    h.closed := array(select x from unnest(h.holes) x where pg_visible_in_snapshot(x, s) and x is distinct
                      from v_own order by x);
    h.holes := array(select x from unnest(h.holes) x where not pg_visible_in_snapshot(x, s) or x = v_own
                      union all select x from pg_snapshot_xip(s) x where x >= v_old_hi
                      union all select v_own where v_own >= v_old_hi and v_own < pg_snapshot_xmax(s));
  end if;
  h.lo := v_old_hi; h.hi := pg_snapshot_xmax(s); h.pos_seq := 0;
  h.pos_xid := case when h.closed <> '{}' then h.closed[1] else h.lo end;
  return h;
end $$;
