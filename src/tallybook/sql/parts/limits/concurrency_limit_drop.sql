-- concurrency_limit_drop(name): remove a rule; false: there is none. Who waits for a permit goes on.
--
-- A job that names a limit without any rule fails: leave out the name first. Writes limit_rule.
-- rights: operator
create or replace function tallybook.concurrency_limit_drop(name text) returns boolean
language plpgsql as $$
begin
  delete from tallybook.limit_rule r where r.kind = 'concurrency' and r.name = concurrency_limit_drop.name;
  if not found then return false; end if;
  perform tallybook._wake(' concurrency_release');
  return true;
end $$;
