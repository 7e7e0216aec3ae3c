-- provider_resolve(data_type, symbol): return the name of the provider that serves this kind of data for this symbol,
-- or null.
--
-- A route for the symbol has precedence over the broad route. Inactive routes and routes to inactive providers are
-- skipped, so the broad route applies while the specific one is switched off. Reads provider_route, provider.
-- profile: nojit
-- rights: worker, operator
create or replace function tallybook.provider_resolve(data_type text, symbol text default null) returns text
language sql stable
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off  -- uses the index of routes
as $$
  select r.provider
    from tallybook.provider_route r join tallybook.provider p on p.name = r.provider
   where r.data_type = provider_resolve.data_type and (r.symbol = provider_resolve.symbol or r.symbol is null)
     and r.active and p.active
   order by r.symbol nulls last limit 1
$$;
