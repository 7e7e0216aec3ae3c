-- provider_field: which secrets each provider has, under which key, since when; never the secrets themselves.
-- rights: operator, reader
create or replace view tallybook.provider_field as
select s.provider, s.field, s.slot, s.key_id, s.set_at, s.sealed_at from tallybook.provider_secret s;
comment on view tallybook.provider_field is
  'Which secrets each provider has, under which key, since when. The secrets themselves are not in it.';
