-- rate_limit_drop(name): remove a rule, and what its keys were pushed back by; false: there is none. Who waits for it
-- goes on.
--
-- A job that names a limit without a rule fails, so that a slip of the pen does not lift a limit: leave out the name
-- first.
-- Writes limit_rule, rate_state, scheduled.
-- rights: operator
create or replace function tallybook.rate_limit_drop(name text,
  at timestamptz default clock_timestamp()) returns boolean
language plpgsql as $$
begin
  delete from tallybook.limit_rule r where r.kind = 'rate' and r.name = rate_limit_drop.name;
  if not found then return false; end if;
  perform tallybook._rate_changed(rate_limit_drop.name, at);
  return true;
end $$;
