-- schedule_drop(name): remove a schedule. False: there is none. Its jobs go on, its fires stay on record.
--
-- One that is declared in code comes back when a worker of that app starts. Writes schedule.
-- rights: operator
create or replace function tallybook.schedule_drop(name text) returns boolean
language sql as $$
  with gone as (delete from tallybook.schedule s where s.name = schedule_drop.name returning 1)
  select exists (select from gone)
$$;
