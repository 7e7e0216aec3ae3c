-- concurrency_limit_drop(name): delete a rule. Returns false if there is none. Jobs that wait for its permits continue.
--
-- A job that names a limit without any rule fails, so remove the name from jobs first. Writes limit_rule.
-- rights: operator
create or replace function tallybook.concurrency_limit_drop(name text) returns boolean
language plpgsql as $$
begin
  delete from tallybook.limit_rule r where r.kind = 'concurrency' and r.name = concurrency_limit_drop.name;
  perform tallybook._wake(' concurrency_release') where found;
  return found;
end $$;
