-- _job_queued(job_id): whether the job is open and no claim has taken its next attempt.
create or replace function tallybook._job_queued(p_job_id bigint) returns boolean
language plpgsql stable
-- profile: lookup
as $$
begin
  return exists (select from tallybook.scheduled s where s.job_id = p_job_id)
      or exists (select from tallybook.waiting w where w.job_id = p_job_id)
      or exists (select from tallybook.entry e where e.job_id = p_job_id
                    and (select o.state from tallybook.outcome o  -- one at a time: a join may read all of the index
                          where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq
                                limit 1) is null
                    and not tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
                    and not exists (select from tallybook.tombstone t
                                     where t.job_id = e.job_id and t.attempt = e.attempt and t.taken));
end $$;
