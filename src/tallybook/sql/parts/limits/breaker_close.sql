-- breaker_close(name): close the breaker of a key by hand: its jobs go on. Its failures until now are forgotten.
--
-- Returns whether it was not closed before. Errors: TB005 there is no such breaker. Locks the key's row.
-- Writes rate_state, breaker_state, concurrency_holder.
-- rights: operator
create or replace function tallybook.breaker_close(name text, at timestamptz default clock_timestamp()) returns boolean
language plpgsql as $$
declare
  v_was text;
begin
  if not exists (select from tallybook._limit_of('breaker', breaker_close.name)) then
    raise exception 'there is no breaker %', breaker_close.name using errcode = 'TB005',
      hint = 'Make one by breaker_set.';
  end if;
  select s.state into v_was from tallybook.breaker_state s where s.name = breaker_close.name;
  perform tallybook._breaker_by_hand(breaker_close.name, 'closed', null, at);
  return coalesce(v_was, 'closed') <> 'closed';
end $$;
