-- checkpoint_of(job_id): return a job's newest checkpoint, from whichever attempt, or null.
-- profile: lookup
-- rights: worker
create or replace function tallybook.checkpoint_of(job_id bigint) returns jsonb language sql stable as $$
  select p.checkpoint from tallybook.progress p where p.job_id = checkpoint_of.job_id
$$;

-- _running(lease, job_id, attempt): whether this attempt belongs to the lease and has not ended.
create or replace function tallybook._running(p_lease uuid, p_job_id bigint, p_attempt int) returns boolean
language plpgsql as $$
begin
  return exists (select from tallybook._lease_entries(array[p_lease], array[p_job_id], array[p_attempt]) h
                  where not exists (select from tallybook._outcome_of(h.retention, h.xid, h.seq)));
end $$;
