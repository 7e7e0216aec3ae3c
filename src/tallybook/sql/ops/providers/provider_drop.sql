-- provider_drop(name): remove a provider with its secrets. False: there is none.
--
-- Errors: TB005 routes lead to it. Writes provider and provider_secret.
-- rights: operator
create or replace function tallybook.provider_drop(name text) returns boolean
language plpgsql as $$
declare
  v_routes bigint;
begin
  perform from tallybook.provider p where p.name = provider_drop.name for update;  -- no route comes in between
  if not found then return false; end if;
  select count(*) into v_routes from tallybook.provider_route r where r.provider = provider_drop.name;
  if v_routes > 0 then
    raise exception 'provider % is used by % routes', to_json(provider_drop.name), v_routes
      using errcode = 'TB005', hint =
      'Drop them first, or lead them to another one; to switch the provider off: active => false.';
  end if;
  delete from tallybook.provider p where p.name = provider_drop.name;
  return true;
end $$;
