-- provider_set(name, kind, settings, active): create or change a provider.
--
--   kind      its purpose, in your words; required for a new provider
--   settings  one JSON object without secrets, readable by everyone; replaces the stored one. New provider: {}
--   active    false: it is not loaded and no route leads to it. New provider: true
-- A null leaves a value unchanged. Returns created, changed or unchanged. Running workers use it within seconds.
-- Errors: TB005 invalid value. Reads and writes provider.
-- rights: worker, operator
create or replace function tallybook.provider_set(name text, kind text default null, settings jsonb default null,
  active boolean default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
begin
  perform tallybook._check_name('provider name', provider_set.name, 64);
  if kind is not null then perform tallybook._check_name('kind of provider', kind, 64); end if;
  perform tallybook._refuse(jsonb_typeof(settings) <> 'object',
            format('settings of a provider must be a JSON object, not %s', jsonb_typeof(settings)));
  perform tallybook._refuse(octet_length(settings::text) > 100000, 'settings of a provider are above 100,000 bytes');
  loop
    perform from tallybook.provider k where k.name = provider_set.name for no key update;
    exit when found;
    perform tallybook._refuse(kind is null, format('there is no provider %s', to_json(provider_set.name)),
              'Pass a kind to create it, such as market-data.');
    insert into tallybook.provider (name, kind, settings, active, created_at, changed_at)
    values (provider_set.name, provider_set.kind, coalesce(provider_set.settings, '{}'),
            coalesce(provider_set.active, true), at, at)
    on conflict do nothing;
    if found then return 'created'; end if;
  end loop;
  update tallybook.provider k
     set kind = coalesce(provider_set.kind, k.kind), settings = coalesce(provider_set.settings, k.settings),
         active = coalesce(provider_set.active, k.active), changed_at = at
   where k.name = provider_set.name
     and (k.kind, k.settings, k.active) is distinct from (coalesce(provider_set.kind, k.kind),
          coalesce(provider_set.settings, k.settings), coalesce(provider_set.active, k.active));
  return case when found then 'changed' else 'unchanged' end;
end $$;
