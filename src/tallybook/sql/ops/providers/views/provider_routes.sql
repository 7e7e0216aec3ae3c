-- provider_routes: which provider serves which kind of data. in_force: route and provider are active.
--> Which provider serves which kind of data; in force: route and provider are active.
-- rights: operator, reader
create or replace view tallybook.provider_routes as
select r.data_type, r.symbol, r.provider, r.active, r.active and p.active as in_force
  from tallybook.provider_route r join tallybook.provider p on p.name = r.provider;
