-- route_drop(data_type, symbol): delete a route; without symbol the broad one. Returns false if there is none. Writes
-- provider_route.
-- rights: operator
create or replace function tallybook.route_drop(data_type text, symbol text default null) returns boolean
language plpgsql as $$
begin
  delete from tallybook.provider_route r
   where r.data_type = route_drop.data_type and r.symbol is not distinct from route_drop.symbol;
  return found;
end $$;
