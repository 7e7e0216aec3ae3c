-- breaker_drop(name): delete a breaker. Returns false if there is none. Its waiting jobs continue.
--
-- A job that names a limit without any rule fails, so remove the name from jobs first. Writes limit_rule; deletes from
-- breaker_state.
-- rights: operator
create or replace function tallybook.breaker_drop(name text) returns boolean
language plpgsql as $$
begin
  delete from tallybook.limit_rule r where r.kind = 'breaker' and r.name = breaker_drop.name;
  if not found then return false; end if;
  delete from tallybook.breaker_state s
   where s.name in (select n.name from tallybook.breaker_state n
                     where n.name = breaker_drop.name or split_part(n.name, ':', 1) = breaker_drop.name
                           order by n.name for update)
     and not exists (select from tallybook._limit_of('breaker', s.name));
  perform tallybook._wake(' concurrency_release');
  return true;
end $$;
