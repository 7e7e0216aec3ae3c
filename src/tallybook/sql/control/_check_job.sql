-- _check_job(job_id): raise TB002 unless this job exists, other than as a dead letter.
--
-- For callers that looked in one table after the other and missed a job that was moving. One statement sees it in
-- either.
-- profile: lookup
create or replace function tallybook._check_job(p_job_id bigint) returns void language plpgsql as $$
begin
  if not exists (select from tallybook._aside a where a.job_id = p_job_id and a.place <> 'dead')
     and not exists (select from tallybook.entry e where e.job_id = p_job_id) then
    raise exception 'there is no job %', p_job_id using errcode = 'TB002',
      detail = coalesce(tallybook._pruned_hint(p_job_id), '');
  end if;
end $$;
