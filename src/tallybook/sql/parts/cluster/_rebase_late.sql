-- _rebase_late(at): move jobs that were enqueued into a retired lane after its retirement. Returns their number.
--
-- A transaction that saw the lane while it was live may write to it and commit at any later time; neither side waits. A
-- job cancelled before the move comes here too when a person retries it. All entries below a retired lane's `born` have
-- ended; if there is none above it, the look costs one probe. One session at a time (class 1413565440, object 1). Reads
-- lane, entry, outcome, claim; writes lane, and what _rebase_entries writes.
-- profile: nested
create or replace function tallybook._rebase_late(p_at timestamptz) returns int
language plpgsql
set enable_nestloop = on  -- also if the caller has switched it off
as $$
declare s pg_snapshot := pg_current_snapshot(); l record; v_late int := 0; b record; v_to int;
begin
  if not pg_try_advisory_xact_lock(1413565440, 1) then return 0; end if;
  for l in select k.lane_id, k.queue, k.priority, k.part, k.retention, k.born from tallybook.lane k
            where k.retired_at is not null and exists (
              select from tallybook.entry e where e.lane_id = k.lane_id and e.retention = k.retention
                 and e.xid >= k.born and e.xid < pg_snapshot_xmax(s))
            order by k.lane_id loop
    if exists (select from tallybook.entry e
                where e.lane_id = l.lane_id and e.retention = l.retention and e.xid >= l.born
                      and e.xid < pg_snapshot_xmax(s)
                  and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))) then
      perform pg_advisory_xact_lock(1413565441, l.lane_id);  -- against claim_job
      select n.lane_id into v_to from tallybook._lane(l.queue, l.priority, l.part) n;
      select * into b from tallybook._rebase_entries(array[l.lane_id], array[v_to], array[l.born], pg_snapshot_xmax(s),
                                                     '{}', '{}', '{}', p_at);
      v_late := v_late + b.moved + b.cancelled;
      if b.moved > 0 then perform tallybook._wake(l.queue); end if;
    end if;
    -- All entries below have committed and ended. Written only if it saves the next look some rows.
    update tallybook.lane k set born = pg_snapshot_xmin(s)
     where k.lane_id = l.lane_id and k.born < pg_snapshot_xmin(s)
       and exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention
                      and e.xid >= k.born and e.xid < pg_snapshot_xmin(s));
  end loop;
  return v_late;
end $$;
