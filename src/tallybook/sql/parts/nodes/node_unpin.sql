-- node_unpin(key): let the hash choose the node of a key again. Returns false if it is not pinned. Writes node_pin.
-- rights: operator
create or replace function tallybook.node_unpin(key text) returns boolean language plpgsql as $$
begin
  delete from tallybook.node_pin p where p.key = node_unpin.key;
  return found;
end $$;
