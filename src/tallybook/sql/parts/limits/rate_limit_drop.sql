-- rate_limit_drop(name): delete a rule and the push-backs of its keys. Returns false if there is none. Waiting jobs
-- continue.
--
-- A job that names a limit without a rule fails, so that a spelling mistake does not lift a limit: remove the name from
-- jobs first. Locks and waits as rate_limit_set does.
-- Writes limit_rule, rate_state, scheduled.
-- rights: operator
create or replace function tallybook.rate_limit_drop(name text,
  at timestamptz default clock_timestamp()) returns boolean
language plpgsql as $$
begin
  delete from tallybook.limit_rule r where r.kind = 'rate' and r.name = rate_limit_drop.name;
  perform tallybook._rate_changed(rate_limit_drop.name, at) where found;
  return found;
end $$;
