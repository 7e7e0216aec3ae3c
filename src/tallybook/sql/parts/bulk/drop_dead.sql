-- drop_dead(job_id): delete a dead letter. Returns false if there is none. The history of the job stays.
-- profile: lookup
-- rights: operator
create or replace function tallybook.drop_dead(job_id bigint) returns boolean language sql as $$
  with gone as (delete from tallybook.dead d where d.job_id = drop_dead.job_id returning 1)
  select exists (select from gone)
$$;
