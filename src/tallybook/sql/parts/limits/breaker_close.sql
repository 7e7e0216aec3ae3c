-- breaker_close(name): close the breaker of a key by hand: its jobs go on. Its failures until now are forgotten.
--
-- Returns whether it was not closed before. Errors: TB005 there is no such breaker. Locks the key's row.
-- Writes rate_state, breaker_state, concurrency_holder.
-- rights: operator
create or replace function tallybook.breaker_close(name text, at timestamptz default clock_timestamp()) returns boolean
language sql as $$
  select coalesce(b.was, 'closed') <> 'closed' from tallybook._breaker_by_hand(breaker_close.name, 'closed', null, at) b
$$;
