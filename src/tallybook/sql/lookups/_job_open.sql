-- _job_open(job_id): whether the job has not ended; an open job holds its unique key.
--
-- One statement, so that a job that moves from scheduled to its lane is not missed. A job that was cancelled and not
-- claimed will never start (claimed_jobs looks for tombstones after the claim has committed), so it is not open.
-- profile: lookup
create or replace function tallybook._job_open(p_job_id bigint) returns boolean language plpgsql stable as $$
declare
  -- One's own intent proves nothing. Any other that this snapshot sees does, where it sees no claim: who claimed later
  -- looks for tombstones later still.
  v_own xid8 := pg_current_xact_id_if_assigned();
begin
  return exists (select from tallybook._aside a where a.job_id = p_job_id and a.place <> 'dead'
                    and not exists (select from tallybook.tombstone t where t.job_id = a.job_id
                                    and (t.attempt = a.attempt or t.attempt < a.attempt and not t.once)
                                       and t.cancelled and t.xid is distinct from v_own))
      or exists (select from tallybook.entry e where e.job_id = p_job_id
                    and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
                    and (tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
                         or exists (select from tallybook.tombstone t
                                     where t.job_id = e.job_id and t.attempt = e.attempt and t.taken)
                         or not exists (select from tallybook.tombstone t where t.job_id = e.job_id
                                        and (t.attempt = e.attempt or t.attempt < e.attempt and not t.once)
                                           and t.cancelled and t.xid is distinct from v_own)));
end $$;
