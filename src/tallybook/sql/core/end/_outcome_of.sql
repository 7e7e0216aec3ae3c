-- _outcome_of(retention, xid, seq): how the attempt of an entry ended; no row if it has not.
--
-- It has no settings of its own, so that it is inlined into the calling statement. The limit makes it look up one at a
-- time; a join may read the whole index.
create or replace function tallybook._outcome_of(p_retention "char", p_xid xid8, p_seq bigint)
returns setof tallybook.outcome language sql stable as $$
  select o.* from tallybook.outcome o
   where o.retention = p_retention and o.entry_xid = p_xid and o.entry_seq = p_seq limit 1
$$;
