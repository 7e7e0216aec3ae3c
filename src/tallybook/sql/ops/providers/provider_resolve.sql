-- provider_resolve(data_type, symbol): the name of the provider that serves this kind of data, for this symbol; null:
-- none.
--
-- A rule for the symbol goes before the broad one. Only an active route to an active provider counts: where the
-- specific one is switched off, the broad one is taken. Reads provider_route and provider.
-- rights: worker, operator
create or replace function tallybook.provider_resolve(data_type text, symbol text default null) returns text
language sql stable
-- profile: nojit
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off  -- routes by their index
as $$
  select r.provider
    from tallybook.provider_route r join tallybook.provider p on p.name = r.provider
   where r.data_type = provider_resolve.data_type and (r.symbol = provider_resolve.symbol or r.symbol is null)
     and r.active and p.active
   order by r.symbol nulls last limit 1
$$;
