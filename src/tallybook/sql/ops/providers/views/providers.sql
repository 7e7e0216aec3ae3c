-- providers, provider_routes: whom jobs call, and which routes lead to them; no secret is in here.
create or replace view tallybook.providers as
select p.name, p.kind, p.settings, p.active, p.created_at, p.changed_at from tallybook.provider p;
comment on view tallybook.providers is 'The providers with their settings. Their secrets: provider_field, without the secrets.';

create or replace view tallybook.provider_routes as
select r.data_type, r.symbol, r.provider, r.active, r.active and p.active as in_force
  from tallybook.provider_route r join tallybook.provider p on p.name = r.provider;
comment on view tallybook.provider_routes is 'Which provider serves which kind of data; in force: route and provider are active.';
