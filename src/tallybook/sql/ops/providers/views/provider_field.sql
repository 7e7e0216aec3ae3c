-- provider_field: which secrets each provider has, with their key and age, without the secrets.
--> The names of the secrets of each provider, with the key that encrypts them and their age; no secrets.
-- rights: operator, reader
create or replace view tallybook.provider_field as
select s.provider, s.field, s.slot, s.key_id, s.set_at, s.sealed_at from tallybook.provider_secret s;
