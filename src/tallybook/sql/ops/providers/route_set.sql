-- route_set(data_type, provider, symbol, active): create or change the route of a kind of data to a provider.
--
--   symbol  the route is for this symbol only and has precedence; null: the broad route for all other symbols
--   active  null: unchanged, or true for a new route
-- Returns created, changed or unchanged. Running workers use it within seconds. Errors: TB002 unknown provider, TB005
-- invalid value. Reads and writes provider_route.
-- rights: operator
create or replace function tallybook.route_set(data_type text, provider text, symbol text default null,
  active boolean default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
begin
  perform tallybook._check_name('data type', route_set.data_type, 64);
  if symbol is not null then perform tallybook._check_name('symbol', route_set.symbol, 200); end if;
  perform from tallybook.provider p where p.name = route_set.provider for key share;
  perform tallybook._refuse(not found, format('there is no provider %s', coalesce(to_json(provider)::text, 'null')),
                            null, 'TB002');
  loop
    perform from tallybook.provider_route k
     where k.data_type = route_set.data_type and k.symbol is not distinct from route_set.symbol for update;
    exit when found;
    insert into tallybook.provider_route (data_type, symbol, provider, active, created_at, changed_at)
    values (route_set.data_type, route_set.symbol, route_set.provider, coalesce(route_set.active, true), at, at)
    on conflict do nothing;
    if found then return 'created'; end if;
  end loop;
  update tallybook.provider_route k
     set provider = route_set.provider, active = coalesce(route_set.active, k.active), changed_at = at
   where k.data_type = route_set.data_type and k.symbol is not distinct from route_set.symbol
     and (k.provider, k.active) is distinct from (route_set.provider, coalesce(route_set.active, k.active));
  return case when found then 'changed' else 'unchanged' end;
end $$;
