-- rate_limit_drop(name): remove a rule; false: there is none. What is in line for it starts when its turn comes.
--
-- A job that names a limit without a rule fails, so that a slip of the pen does not lift a limit: leave out the name first.
-- Writes rate_limit.
create or replace function tallybook.rate_limit_drop(name text) returns boolean
language plpgsql as $$
begin
  delete from tallybook.rate_limit r where r.name = rate_limit_drop.name;
  return found;
end $$;
