-- node_retire(name): send no more keys to a node. Returns retired, or unchanged if it is retiring already.
--
-- Its jobs still run; keys pinned to it stay. Errors: TB002 unknown node, TB005 the last live one. Reads and writes
-- node.
-- rights: operator
create or replace function tallybook.node_retire(name text, at timestamptz default clock_timestamp()) returns text
language sql as $$ select tallybook._node_leaves(name, 'retiring', at) $$;

-- _node_leaves(name, state, at): set a node's state to another than live; returns retired, removed or unchanged.
create or replace function tallybook._node_leaves(p_name text, p_state text, p_at timestamptz) returns text
language plpgsql as $$
declare v_state text;
begin
  lock table tallybook.node in share row exclusive mode;
  select n.state into v_state from tallybook.node n where n.name = p_name;
  perform tallybook._refuse(not found or v_state = 'gone' and p_state <> 'gone',
    format('there is no node %s', coalesce(to_json(p_name)::text, 'null')), null, 'TB002');
  perform tallybook._refuse(
    v_state = 'live' and not exists (select from tallybook.node n where n.state = 'live' and n.name <> p_name),
    format('node %s is the last live one', to_json(p_name)), 'Add another node first.');
  update tallybook.node n set state = p_state, changed_at = p_at where n.name = p_name and n.state <> p_state;
  return case when not found then 'unchanged' when p_state = 'gone' then 'removed' else 'retired' end;
end $$;
