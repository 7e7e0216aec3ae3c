-- audit_add(actor, via, action, target, done): record a change: its actor, the channel (web, api, ...), the verb, what
-- it was applied to, and the result. Call it in the transaction of the change, so that both commit or neither does.
--
-- target and done must not contain args or secrets. Returns the row's id. Errors: TB005 a name that is empty or too
-- long, or a value that is not a JSON object of at most 8 KB. Writes audit.
-- rights: operator
create or replace function tallybook.audit_add(actor text, via text, action text, target jsonb default '{}',
  done jsonb default '{}', at timestamptz default clock_timestamp()) returns bigint language sql as $$
  select tallybook._refuse((length(n.name) between 1 and n.most) is not true,
           format('the %s of an audit row has %s characters', n.what, coalesce(length(n.name), 0)),
           format('It must have 1 to %s.', n.most))
    from (values ('actor', actor, 200), ('via', via, 32), ('action', action, 64)) n(what, name, most);
  select tallybook._refuse(o.object is null or jsonb_typeof(o.object) <> 'object'
                           or octet_length(o.object::text) > 8192,
           format('the %s of an audit row must be a JSON object of at most 8 KB', o.what),
           'Store ids and counts instead of the changed values.')
    from (values ('target', target), ('done', done)) o(what, object);
  insert into tallybook.audit (at, actor, via, action, target, done) values (at, actor, via, action, target, done)
  returning id
$$;
