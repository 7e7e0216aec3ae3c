-- node_pin(key, node): send the jobs of a key to this node. Returns created, changed or unchanged.
--
-- Jobs that are already enqueued stay where they are. Errors: TB002 unknown node (if nodes are recorded), TB005.
-- Reads node, reads and writes node_pin.
-- rights: operator
create or replace function tallybook.node_pin(key text, node text, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare v_was text;
begin
  perform tallybook._check_name('key', node_pin.key, 200), tallybook._check_name('node name', node_pin.node, 64);
  lock table tallybook.node in row exclusive mode;  -- not beside node_remove, which looks for pins
  perform tallybook._refuse(exists (select from tallybook.node)
    and not exists (select from tallybook.node n where n.name = node_pin.node and n.state <> 'gone'),
    format('there is no node %s', to_json(node_pin.node)), null, 'TB002');
  select p.node into v_was from tallybook.node_pin p where p.key = node_pin.key for update;
  if v_was = node_pin.node then return 'unchanged'; end if;
  insert into tallybook.node_pin as p (key, node, pinned_at) values (node_pin.key, node_pin.node, at)
  on conflict on constraint node_pin_pkey do update set node = excluded.node, pinned_at = excluded.pinned_at;
  return case when v_was is null then 'created' else 'changed' end;
end $$;
