-- breaker_close(name): close the breaker of a key by hand. Its jobs continue, and its failures are reset.
--
-- Returns false if it was closed already. Errors: TB005 unknown breaker. Locks the key's row.
-- Writes rate_state, breaker_state, concurrency_holder.
-- rights: operator
create or replace function tallybook.breaker_close(name text, at timestamptz default clock_timestamp()) returns boolean
language sql as $$
  select coalesce(b.was, 'closed') <> 'closed' from tallybook._breaker_by_hand(breaker_close.name, 'closed', null, at) b
$$;
