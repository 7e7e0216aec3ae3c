-- _doctor_storage(): the size of the schema, dead rows, autovacuum, the age of transaction ids.
--
-- Reads file sizes and the server's statistics only, so its cost does not grow with history.
-- rights: operator, as the caller
create or replace function tallybook._doctor_storage() returns setof tallybook._check language plpgsql stable as $$
declare v_tables jsonb; v_freeze numeric := current_setting('autovacuum_freeze_max_age')::numeric;
begin
  select jsonb_agg(jsonb_build_object('table', t.root, 'bytes', t.bytes) order by t.bytes desc) into v_tables
    from (select coalesce(pg_partition_root(c.oid), c.oid)::regclass::text as root,
          sum(pg_total_relation_size(c.oid)) as bytes
            from pg_class c where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r' group by 1) t;
  return query select * from tallybook._finding('size', null,
    (select format('%s in %s tables; the largest: %s. PostgreSQL does not know the free disk space: '
                   'monitor it on the server',
                   pg_size_pretty(sum((t ->> 'bytes')::numeric)), count(*),
                   string_agg(format('%s %s', t ->> 'table', pg_size_pretty((t ->> 'bytes')::numeric)), ', '
                              order by n) filter (where n <= 3))
       from jsonb_array_elements(v_tables) with ordinality x(t, n)), null,
    jsonb_build_object('bytes', (select sum((t ->> 'bytes')::numeric) from jsonb_array_elements(v_tables) x(t)),
                       'tables', jsonb_path_query_array(v_tables, '$[0 to 9]'), 'database_bytes',
                       pg_database_size(current_database())));

  return query select * from tallybook._finding('dead_rows', (
      select jsonb_agg(jsonb_build_object('level', case when s.n_dead_tup > 1000000 then 'warning'
                                          else 'note' end, 'dead', s.n_dead_tup, 'live', s.n_live_tup,
               'last_autovacuum', s.last_autovacuum, 'table', s.relname,
               'text', format('%s has %s dead rows and %s live rows', s.relid::regclass, s.n_dead_tup, s.n_live_tup),
               'do', format('vacuum %s;', s.relid::regclass)) order by s.n_dead_tup desc)
        from pg_stat_user_tables s
       where s.schemaname = 'tallybook' and s.n_dead_tup > 10000 and s.n_dead_tup > 2 * s.n_live_tup),
    'no table has too many dead rows',
    'Autovacuum is too slow or off, or cannot remove them: see the checks horizon and autovacuum. Then run:');

  return query select * from tallybook._finding('autovacuum', (
      select jsonb_agg(jsonb_build_object('level', x.level, 'text', x.text, 'do', x.command) order by x.n, x.text)
             from (
        select 1 as n, 'problem' as level, format('%s is off: dead rows are never removed', s.name) as text,
               format('alter system set %s = on; select pg_reload_conf();', s.name) as command
          from pg_settings s where s.name in ('autovacuum', 'track_counts') and s.setting = 'off'
        union all
        select 2, 'warning', format('autovacuum is switched off for %s', c.oid::regclass),
               format('alter table %s reset (autovacuum_enabled);', c.oid::regclass)
          from pg_class c, pg_options_to_table(c.reloptions) o
         where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r' and o.option_name = 'autovacuum_enabled'
               and not o.option_value::boolean) x),
    'autovacuum is on, for every table', 'Switch it on:');

  return query select * from tallybook._finding('wraparound', (
      select jsonb_agg(jsonb_build_object('level', case when x.age > 1500000000 then 'problem'
                                          else 'warning' end, 'age', x.age,
               'text', format('%s: the oldest transaction id is %s transactions old', x.what, x.age), 'do', x.command)
               order by x.age desc, x.what)
        from (select 'database ' || d.datname as what, age(d.datfrozenxid) as age, 'vacuum freeze;' as command
                from pg_database d where d.datname = current_database()
              union all
              select c.oid::regclass::text, age(c.relfrozenxid), format('vacuum freeze %s;', c.oid::regclass)
                from pg_class c where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r') x
       where x.age > least(v_freeze * 1.25, 1500000000)),
    (select format('the oldest transaction id is %s transactions old; the limit is 2 billion',
                   age(d.datfrozenxid))
       from pg_database d where d.datname = current_database()),
    'Autovacuum freezes old rows in time unless something pins the horizon (see the check horizon), or it is off or '
    'too slow. At 2 billion, the server refuses all writes. As the owner, run:',
    jsonb_build_object('autovacuum_freeze_max_age', v_freeze));
end $$;
