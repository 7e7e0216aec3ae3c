-- provider_drop(name): remove a provider with its secrets. False: there is none.
--
-- Errors: TB005 routes lead to it. Writes provider and provider_secret.
-- rights: operator
create or replace function tallybook.provider_drop(name text) returns boolean
language plpgsql as $$
begin
  perform from tallybook.provider p where p.name = provider_drop.name for update;  -- no route comes in between
  if not found then return false; end if;
  perform tallybook._refuse(r.n > 0, format('provider %s is used by %s routes', to_json(provider_drop.name), r.n),
            'Drop them first, or lead them to another one; to switch the provider off: active => false.')
     from (select count(*) as n from tallybook.provider_route k where k.provider = provider_drop.name) r;
  delete from tallybook.provider p where p.name = provider_drop.name;
  return true;
end $$;
