-- _provider_read(name): return one provider with its encrypted secrets from one snapshot, or null.
-- rights: worker, operator
create or replace function tallybook._provider_read(p_name text) returns jsonb
language sql stable as $$
  select jsonb_build_object('name', p.name, 'kind', p.kind, 'settings', p.settings, 'active', p.active, 'secrets',
           coalesce((select jsonb_agg(tallybook._as_stored(s) - 'provider' order by s.field, s.slot)
                       from tallybook.provider_secret s where s.provider = p.name), '[]'))
    from tallybook.provider p where p.name = p_name
$$;

-- _provider_secrets_under_others(key_id, after...): return up to 100 encrypted secrets that use another key, in pages
-- after the given place.
-- rights: operator
create or replace function tallybook._provider_secrets_under_others(p_key_id text, p_provider text, p_field text,
  p_slot text)
returns jsonb language sql stable as $$
  select coalesce(jsonb_agg(tallybook._as_stored(k.s) order by (k.s).provider, (k.s).field, (k.s).slot), '[]')
    from (select x as s from tallybook.provider_secret x
           where x.key_id <> p_key_id and (x.provider, x.field, x.slot) > (p_provider, p_field, p_slot)
           order by x.provider, x.field, x.slot limit 100) k
$$;

-- _as_stored(secret): return an encrypted secret for a program that has the keys.
create or replace function tallybook._as_stored(s tallybook.provider_secret) returns jsonb
language sql immutable as $$
  select jsonb_build_object('provider', s.provider, 'field', s.field, 'slot', s.slot, 'key_id', s.key_id,
                            'nonce', encode(s.nonce, 'hex'), 'ciphertext', encode(s.ciphertext, 'hex'))
$$;
