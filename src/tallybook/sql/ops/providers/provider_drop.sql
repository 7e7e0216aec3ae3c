-- provider_drop(name): delete a provider with its secrets. Returns false if there is none.
--
-- Errors: TB005 a route uses it. Writes provider, provider_secret.
-- rights: operator
create or replace function tallybook.provider_drop(name text) returns boolean
language plpgsql as $$
begin
  perform from tallybook.provider p where p.name = provider_drop.name for update;  -- blocks new routes to it
  if not found then return false; end if;
  perform tallybook._refuse(r.n > 0, format('provider %s is used by %s routes', to_json(provider_drop.name), r.n),
            'Drop these routes or change their provider first. To switch a provider off, pass active => false.')
     from (select count(*) as n from tallybook.provider_route k where k.provider = provider_drop.name) r;
  delete from tallybook.provider p where p.name = provider_drop.name;
  return true;
end $$;
