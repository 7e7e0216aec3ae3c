-- _job_queued(job_id): whether the job is open and no claim has taken its next attempt.
-- profile: lookup
create or replace function tallybook._job_queued(p_job_id bigint) returns boolean language plpgsql stable as $$
begin
  return exists (select from tallybook._aside a where a.job_id = p_job_id and a.place <> 'dead')
      or exists (select from tallybook.entry e where e.job_id = p_job_id
                    and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
                    and not tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
                    and not exists (select from tallybook.tombstone t
                                     where t.job_id = e.job_id and t.attempt = e.attempt and t.taken));
end $$;
