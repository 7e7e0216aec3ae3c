-- _unstarted_attempts(job_id, attempt): how many of a job's attempts never started, because the job was set aside for
-- another worker, or was cancelled before its start and retried by a person.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook._unstarted_attempts(p_job_id bigint, p_attempt int) returns int
language plpgsql stable as $$
begin
  if p_attempt = 1 then return 0; end if;
  return (select count(*) from tallybook.entry e
            left join lateral tallybook._outcome_of(e.retention, e.xid, e.seq) o on true
           where e.job_id = p_job_id and e.attempt < p_attempt
                 and (o.state = 'moved' or coalesce(o.state, 'cancelled') = 'cancelled' and not exists (
             select from tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq))));
end $$;
