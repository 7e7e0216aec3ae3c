-- _job_place(job_id): the row of a job in whichever table it is, or no row.
--
--   place  scheduled, waiting, dead, or entry: its newest attempt
--   since  since when it waits, is dead, or has ended; state: of an entry with an outcome; reason: of a dead letter
-- Uses the snapshot of the caller's statement, so a job that moves between tables is not missed.
-- Reads scheduled, waiting, dead, entry, outcome, lane.
-- profile: nested
create or replace function tallybook._job_place(p_job_id bigint) returns setof tallybook._job_place
language plpgsql stable rows 1 as $$
declare v_row jsonb;
begin
  select to_jsonb(a) into v_row from tallybook._aside a where a.job_id = p_job_id limit 1;
  if not found then
    select to_jsonb(e) || jsonb_build_object('place', 'entry', 'since', o.ended_at, 'state', o.state, 'error', o.error)
      into v_row
      from tallybook._newest_entry(p_job_id) e
      left join lateral tallybook._outcome_of(e.retention, e.xid, e.seq) o on true;
  end if;
  return query
  select r.* from tallybook.lane l, jsonb_populate_record(null::tallybook._job_place, v_row || jsonb_build_object(
           'queue', l.queue, 'priority', l.priority, 'part', l.part, 'retired', l.retired_at is not null,
           'retention', l.retention, 'error', coalesce(nullif(v_row -> 'error', 'null'), v_row -> 'errors' -> -1))) r
   where l.lane_id = (v_row ->> 'lane_id')::int;
end $$;
