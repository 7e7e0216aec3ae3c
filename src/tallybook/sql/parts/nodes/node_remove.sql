-- node_remove(name, anyway): mark a node as gone, so that nothing uses it any more. Returns removed, or unchanged if it
-- was already gone.
--
-- Its row stays, so ids of its jobs show its name and its number is never reused. The caller checks for open jobs on
-- that node.
--   anyway  true: also if keys are pinned to it. Their pins are deleted, and the hash chooses their node
-- Errors: TB002 unknown node, TB005 the last live one, or keys are pinned to it. Reads and writes node, node_pin.
-- rights: operator
create or replace function tallybook.node_remove(name text, anyway boolean default false,
  at timestamptz default clock_timestamp()) returns text language sql as $$
  lock table tallybook.node in share row exclusive mode;
  delete from tallybook.node_pin p where anyway and p.node = node_remove.name;
  select tallybook._refuse(count(*) > 0, format('%s keys are pinned to node %s', count(*), to_json(node_remove.name)),
                           'Pin them to another node, or unpin them, first.')
    from tallybook.node_pin p where p.node = node_remove.name;
  select tallybook._node_leaves(name, 'gone', at)
$$;
