-- _doctor_roles(): whether the recorded roles have the rights of _rights. Only grants count, not the rights of PUBLIC.
-- rights: operator
create or replace function tallybook._doctor_roles() returns setof tallybook._check language sql stable as $$
  select * from tallybook._finding('roles', (
      select jsonb_agg(jsonb_build_object('level', 'warning', 'text', x.text) order by x.text) from (
        select format('role %s is recorded, but does not exist in this cluster', k.name) as text
          from tallybook.role k where not exists (select from pg_roles r where r.rolname = k.name)
        union all
        select format('%s may not use %s', k.name, p.oid::regprocedure)
          from tallybook.role k join pg_roles r on r.rolname = k.name
          join tallybook._rights() g on k.kind = any (g.roles) and g.kind in ('definer', 'caller')
          join pg_proc p on p.pronamespace = 'tallybook'::regnamespace and p.proname = g.name
         where not exists (select from aclexplode(p.proacl) a where a.grantee = r.oid)
        union all
        select format('%s may not read tallybook.%s', k.name, g.name)
          from tallybook.role k join pg_roles r on r.rolname = k.name
          join tallybook._rights() g on k.kind = any (g.roles) and g.kind = 'view'
          join pg_class c on c.relnamespace = 'tallybook'::regnamespace and c.relname = g.name
         where case when g.columns is null then not exists (select from aclexplode(c.relacl) a where a.grantee = r.oid)
                    else exists (select from pg_attribute t
                                  where t.attrelid = c.oid and t.attname = any (regexp_split_to_array(g.columns,
                                      ', *'))
                                    and not exists (select from aclexplode(t.attacl) a where a.grantee = r.oid)) end
        union all
        select format('%s does not run with the rights of its owner', p.oid::regprocedure)
          from tallybook._rights() g join pg_proc p on p.pronamespace = 'tallybook'::regnamespace and p.proname = g.name
         where g.kind = 'definer' and g.roles <> '{}' and not p.prosecdef and exists (select from tallybook.role)) x),
    case when exists (select from tallybook.role) then 'every role has its rights'
         else 'no roles are in use: every user of the schema has all rights' end,
    'Run as the owner of the schema: `tallybook roles`.', jsonb_build_object('roles',
        (select jsonb_agg(k.name order by k.kind) from tallybook.role k)))
$$;
