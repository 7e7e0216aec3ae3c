-- _attempt(job_id, attempt): the entry of an attempt after the first, nulls if there is none. Because of the order only
-- the index of these fits, whatever the planner estimates.
-- profile: hot
create or replace function tallybook._attempt(p_job_id bigint, p_attempt int) returns tallybook.entry
language plpgsql stable
set enable_sort = off  -- the index has them in order: a sort would read all
as $$
declare e tallybook.entry;
begin
  select x.* into e from tallybook.entry x
   where x.job_id = p_job_id and x.attempt >= p_attempt and x.attempt > 1 order by x.attempt limit 1;
  if e.attempt <> p_attempt then return null; end if;
  return e;
end $$;
