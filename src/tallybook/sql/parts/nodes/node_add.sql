-- node_add(name, address, number, system_identifier): record a node. Returns created, changed or unchanged.
--
--   address            the parts that differ from the DSN of this database, like 'host=north dbname=shop'; never a
--                      password
--   number             the node's number in its job ids, 0 to 1023; it cannot change
--   system_identifier  that of its cluster, if known
-- A retiring or removed node becomes live again. Errors: TB005 invalid value, a number or name in use.
-- Reads and writes node.
-- rights: operator
create or replace function tallybook.node_add(name text, address text, number int,
  system_identifier bigint default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare n tallybook.node;
begin
  perform tallybook._check_name('node name', node_add.name, 64);
  perform tallybook._refuse(node_add.name !~ '^[A-Za-z0-9][A-Za-z0-9_.:-]*$' or node_add.name in ('all', 'home'),
    format('invalid node name %s', to_json(node_add.name)),
    'Use letters, digits and _ . : -; "all" and "home" are reserved.');
  perform tallybook._check_range('number', node_add.number::text, node_add.number between 0 and 1023,
                                 'It must be from 0 to 1023.');
  perform tallybook._refuse(node_add.address is null or node_add.address ~* 'password|client_secret|://[^/@]*:[^/@]*@',
    'an address must not contain a password', 'Pass user and password in the DSN, PGPASSFILE or a service file.');
  lock table tallybook.node in share row exclusive mode;
  select k.* into n from tallybook.node k where k.number = node_add.number or k.name = node_add.name
   order by k.name = node_add.name desc limit 1;
  if not found then
    insert into tallybook.node (number, name, address, system_identifier, added_at, changed_at)
    values (node_add.number, node_add.name, node_add.address, node_add.system_identifier, at, at);
    return 'created';
  end if;
  perform tallybook._refuse(n.name <> node_add.name, format('number %s belongs to node %s', n.number, to_json(n.name)),
    'List a database once. Another needs a free number: `tallybook uninstall` (removes its jobs), `migrate --node N`.');
  perform tallybook._refuse(n.number <> node_add.number, format('node %s has number %s', to_json(n.name), n.number),
    'The number is part of its job ids: add the other database under another name.');
  update tallybook.node k
     set address = node_add.address, state = 'live', changed_at = at,
         system_identifier = coalesce(node_add.system_identifier, k.system_identifier)
   where k.number = n.number
     and (k.address, k.state, k.system_identifier) is distinct from
         (node_add.address, 'live', coalesce(node_add.system_identifier, k.system_identifier));
  return case when found then 'changed' else 'unchanged' end;
end $$;
