-- _newest_entry(job_id): the newest entry of a job, nulls if there is none. Its cost does not grow with the number of
-- attempts: the index of attempts after the first is read from its end.
-- profile: hot
create or replace function tallybook._newest_entry(p_job_id bigint) returns tallybook.entry
language plpgsql stable
set enable_sort = off  -- the index has them in order: a sort would read all
as $$
declare e tallybook.entry;
begin
  select x.* into e from tallybook.entry x where x.job_id = p_job_id and x.attempt > 1 order by x.attempt desc limit 1;
  if not found then select x.* into e from tallybook.entry x where x.job_id = p_job_id limit 1; end if;
  return e;
end $$;
