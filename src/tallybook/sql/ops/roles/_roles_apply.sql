-- _roles_apply(): give the recorded roles exactly the rights of _rights; do nothing if none is recorded. Returns the
-- number of roles.
--
-- `tallybook roles` and each migration end with it, in their own transaction, because "create or replace function"
-- resets SECURITY DEFINER and the search_path, and a new function is open to PUBLIC. A role that this cluster does not
-- have (the database was moved) is skipped. pg_temp is last in the search_path; otherwise temporary tables would be
-- found first. Rights of other roles stay, except those of PUBLIC. Only the owner can run it. Reads role, pg_proc,
-- pg_class.
create or replace function tallybook._roles_apply() returns int
language plpgsql as $$
declare v_names text[]; r record;
begin
  v_names := array(select k.name from tallybook.role k join pg_catalog.pg_roles p on p.rolname = k.name);
  if v_names = '{}' then return 0; end if;
  perform tallybook._roles_revoke(v_names);
  execute 'grant usage on schema tallybook to ' || tallybook._roles_named(array(select k.kind from tallybook.role k));
  for r in
    select p.oid::regprocedure::text as call, g.kind, tallybook._roles_named(g.roles) as names, p.prosecdef as definer
      from pg_catalog.pg_proc p left join tallybook._rights() g on g.name = p.proname
           and g.kind in ('definer', 'caller')
     where p.pronamespace = 'tallybook'::regnamespace order by p.oid
  loop
    execute format('revoke all on function %s from public', r.call);
    if r.names is not null then execute format('grant execute on function %s to %s', r.call, r.names); end if;
    if r.kind = 'definer' and r.names is not null then
      execute format('alter function %s security definer set search_path = pg_catalog, pg_temp', r.call);
    elsif r.definer then
      execute format('alter function %s security invoker reset search_path', r.call);
    end if;
  end loop;
  for r in select g.*, tallybook._roles_named(g.roles) as names from tallybook._rights() g where g.kind = 'view' loop
    continue when r.names is null;
    execute format('grant select %s on tallybook.%I to %s', '(' || r.columns || ')', r.name, r.names);
  end loop;
  return cardinality(v_names);
end $$;

-- _roles_named(kinds): return the names of these roles as an SQL list, or null if this cluster has none of them.
create or replace function tallybook._roles_named(p_kinds text[]) returns text
language sql stable as $$
  select string_agg(format('%I', k.name), ', ' order by k.kind)
    from tallybook.role k join pg_catalog.pg_roles p on p.rolname = k.name where k.kind = any (p_kinds)
$$;

-- _roles_revoke(names): revoke all rights in the schema from these roles. Only existing rights are revoked, because a
-- write to a catalogue row of a table or function makes sessions plan again.
create or replace function tallybook._roles_revoke(p_names text[]) returns void
language plpgsql as $$
declare r record;
begin
  for r in
    select distinct o.what, p.rolname
      from (select 'schema tallybook' as what, s.nspacl as acl from pg_catalog.pg_namespace s
             where s.nspname = 'tallybook'
            union all select format('function %s', f.oid::regprocedure), f.proacl from pg_catalog.pg_proc f
             where f.pronamespace = 'tallybook'::regnamespace
            union all
            select format('%s tallybook.%I', case when c.relkind = 'S' then 'sequence' else 'table' end, c.relname), x
              from pg_catalog.pg_class c, lateral (
                select c.relacl union all select t.attacl from pg_catalog.pg_attribute t where t.attrelid = c.oid) a(x)
             where c.relnamespace = 'tallybook'::regnamespace) o,
           aclexplode(o.acl) a join pg_catalog.pg_roles p on p.oid = a.grantee
     where p.rolname = any (p_names)
  loop
    execute format('revoke all on %s from %I', r.what, r.rolname);
  end loop;
end $$;

-- _roles_use(producer, worker, operator, reader, metrics): record these roles instead of the former ones, and apply
-- their rights.
--
-- Errors: TB005 a role does not exist, or two have one name. Writes role.
create or replace function tallybook._roles_use(producer name, worker name, operator name, reader name,
  metrics name) returns int
language plpgsql as $$
declare v_names name[] := array[producer, worker, operator, reader, metrics]; v_missing text;
begin
  select string_agg(to_json(n)::text, ', ') into v_missing from unnest(v_names) n
   where not exists (select from pg_catalog.pg_roles p where p.rolname = n);
  perform tallybook._refuse(v_missing is not null or array_position(v_names, null) is not null,
            format('there is no role %s', coalesce(v_missing, 'without a name')), 'Create it first.');
  perform tallybook._refuse((select count(distinct n) from unnest(v_names) n) < 5, 'two roles have the same name');
  perform tallybook._roles_revoke(array(select k.name::text from tallybook.role k where k.name <> all (v_names)));
  delete from tallybook.role;
  insert into tallybook.role (kind, name)
  select k, n from unnest('{producer,worker,operator,reader,metrics}'::text[], v_names) u(k, n);
  return tallybook._roles_apply();
end $$;

-- _roles_forget(): undo roles: functions run with the caller's rights again and are open to PUBLIC. The roles
-- themselves stay.
create or replace function tallybook._roles_forget() returns void
language plpgsql as $$
declare r record;
begin
  perform tallybook._roles_revoke(array(select k.name::text from tallybook.role k));
  for r in select p.oid::regprocedure::text as call, p.prosecdef as definer from pg_catalog.pg_proc p
            where p.pronamespace = 'tallybook'::regnamespace loop
    execute format('grant execute on function %s to public', r.call);
    if r.definer then execute format('alter function %s security invoker reset search_path', r.call); end if;
  end loop;
  delete from tallybook.role;
end $$;
