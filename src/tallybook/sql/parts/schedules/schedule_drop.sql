-- schedule_drop(name): delete a schedule. Returns false if there is none. Its jobs continue, and its fires stay.
--
-- A schedule declared in code comes back when a worker of that app starts. Writes schedule.
-- rights: operator
create or replace function tallybook.schedule_drop(name text) returns boolean
language sql as $$
  with gone as (delete from tallybook.schedule s where s.name = schedule_drop.name returning 1)
  select exists (select from gone)
$$;
