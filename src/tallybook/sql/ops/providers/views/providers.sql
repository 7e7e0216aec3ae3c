-- providers: providers with their settings, without secrets.
--> The providers with their settings. provider_field lists the names of their secrets.
-- rights: worker, operator; reader (name, kind, active, created_at, changed_at)
create or replace view tallybook.providers as
select p.name, p.kind, p.settings, p.active, p.created_at, p.changed_at from tallybook.provider p;
