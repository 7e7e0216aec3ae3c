-- _folded(below): whether the counters have passed all transactions before this one: what they have not read must not go.
--
-- Nothing is counted yet, so nothing is behind. The counters bring their own.
create or replace function tallybook._folded(p_below xid8) returns boolean
language sql stable as $$ select true $$;
