-- node_remove(name, anyway): take a node from the list. Returns removed, or unchanged where it is gone already.
--
-- Its row stays, so that ids of its jobs can be named and nobody else gets its number. Whether jobs are open there the
-- caller looks up on that node.
--   anyway  also where keys are pinned to it: these pins go, and the hash chooses for their keys
-- Errors: TB002 no such node, TB005 the last live one, or keys that are pinned to it. Reads and writes node, node_pin.
-- rights: operator
create or replace function tallybook.node_remove(name text, anyway boolean default false,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  v_pins bigint;
begin
  if anyway then
    delete from tallybook.node_pin p where p.node = node_remove.name;
  else
    select count(*) into v_pins from tallybook.node_pin p where p.node = node_remove.name;
    perform tallybook._refuse(v_pins > 0, format('%s keys are pinned to node %s', v_pins, to_json(node_remove.name)),
      'Pin them to another node, or unpin them, first.');
  end if;
  return tallybook._node_leaves(node_remove.name, 'gone', at);
end $$;
