-- _rebase_late(at): bring over what was put in a retired lane after its retirement. Returns how many jobs.
--
-- A transaction that saw the lane while it was live may write to it and commit at any later time: no producer is ever
-- waited for, and none waits. A job that was cancelled before the move comes here too when a person retries it. A
-- retired lane's born is the mark below which all is over; where nothing lies above it the look costs one probe. One
-- session at a time (class 1413565440, object 1). Reads lane, entry, outcome, claim; writes lane, and what
-- _rebase_entries writes.
create or replace function tallybook._rebase_late(p_at timestamptz) returns int
language plpgsql
-- profile: nested
set enable_nestloop = on  -- also where the caller has it off
as $$
declare
  s pg_snapshot := pg_current_snapshot(); l record; v_late int := 0; b record; v_to int;
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
    -- What lies below has committed and is over. Written only where the next look would read over something.
    update tallybook.lane k set born = pg_snapshot_xmin(s)
     where k.lane_id = l.lane_id and k.born < pg_snapshot_xmin(s)
       and exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention
                      and e.xid >= k.born and e.xid < pg_snapshot_xmin(s));
  end loop;
  return v_late;
end $$;
