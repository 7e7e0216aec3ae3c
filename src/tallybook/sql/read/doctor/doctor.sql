-- doctor(about): check the database. Returns one row per check.
--
--   about   one group of checks: horizon, storage, settings, workers, queues, maintenance, counters, roles; null: all
-- Returns:
--   name     the check
--   level    ok, note (good to know), warning (will cause trouble), problem (causes trouble now)
--   finding  what the check found, for people
--   advice   what to do, or null
--   details  the finding for programs, with the first 20 items and their number
-- The group counters reads the whole history; with about = null it runs only if the ledgers are below 64 MB. No other
-- group reads history. A group that cannot be checked (a missing right, a lock) becomes a row instead of an error,
-- unless the statement_timeout ends it. If the server hides something because the caller lacks pg_monitor, the finding
-- mentions it. The server's own views are read with the caller's rights. Errors: TB005 an unknown group. Reads all
-- small tables and PostgreSQL's views; writes nothing.
-- profile: nojit
-- rights: operator, as the caller
create or replace function tallybook.doctor(about text default null, at timestamptz default clock_timestamp())
returns table (name text, level text, finding text, advice text, details jsonb) language plpgsql stable as $$
declare v_group text; v_groups text[] := '{horizon,storage,settings,workers,queues,maintenance,counters,roles}';
begin
  if doctor.about <> all (v_groups) then
    raise exception 'the doctor has no checks about %', to_json(doctor.about)
      using errcode = 'TB005', hint = 'It has checks about ' || array_to_string(v_groups, ', ') || '.';
  end if;
  foreach v_group in array case when doctor.about is null then v_groups else array[doctor.about] end loop
    begin
      case v_group
        when 'horizon' then return query select * from tallybook._doctor_horizon(doctor.at);
        when 'storage' then return query select * from tallybook._doctor_storage();
        when 'settings' then return query select * from tallybook._doctor_settings();
        when 'workers' then return query select * from tallybook._doctor_workers(doctor.at);
        when 'queues' then return query select * from tallybook._doctor_queues(doctor.at);
        when 'maintenance' then return query select * from tallybook._doctor_maintenance(doctor.at);
        when 'counters' then return query select * from tallybook._doctor_counters(doctor.about is not null);
        when 'roles' then return query select * from tallybook._doctor_roles();
      end case;
    exception when others then
      return query select v_group, 'note'::text, format('could not be checked: %s', sqlerrm),
        case when sqlstate = '42501' then 'Run it as a user with the role operator, or the owner of the schema.'::text
             else 'Run it again. If it fails again, run it as the owner of the schema.' end,
               jsonb_build_object('sqlstate', sqlstate);
    end;
  end loop;
end $$;

-- _finding(name, items, fine, advice, details): the row of one check. items: [{"level", "text", "do"}], worst first. do
-- is a command that fixes the item. Without items the level is ok and the finding is `fine`.
-- rights: operator, as the caller
create or replace function tallybook._finding(p_name text, p_items jsonb, p_fine text, p_advice text,
  p_details jsonb default '{}') returns setof tallybook._check language sql immutable as $$
  select p_name, coalesce(f.level, 'ok'),
         coalesce(f.texts || case when f.n > 3 then format('; and %s more', f.n - 3) else '' end, p_fine),
         case when f.n > 0 then concat_ws(' ', p_advice, f.commands) end,
         p_details || case when f.n > 0 then jsonb_build_object('count', f.n, 'items',
                                                                jsonb_path_query_array(p_items, '$[0 to 19]'))
                                                                else '{}' end
    from (select count(*) as n,
                 (array['problem', 'warning', 'note'])[min(array_position(array['problem', 'warning', 'note'],
                     i.item ->> 'level'))] as level,
                 string_agg(i.item ->> 'text', '; ' order by i.n) filter (where i.n <= 3) as texts,
                 string_agg(i.item ->> 'do', ' ' order by i.n) filter (where i.n <= 3) as commands
            from jsonb_array_elements(coalesce(p_items, '[]')) with ordinality i(item, n)) f
$$;

-- _ago(duration): format a duration for people, with one unit.
-- rights: operator, as the caller
create or replace function tallybook._ago(p_time interval) returns text language sql immutable as $$
  select case when s.s < 120 then floor(s.s) || ' s' when s.s < 7200 then floor(s.s / 60) || ' min'
              when s.s < 172800 then floor(s.s / 3600) || ' h' else floor(s.s / 86400) || ' days' end
    from (select greatest(extract(epoch from p_time), 0)) s(s)
$$;
