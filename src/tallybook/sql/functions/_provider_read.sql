-- _provider_read(name): one provider with its secrets as they are stored, in one snapshot; null: there is none.
create or replace function tallybook._provider_read(p_name text) returns jsonb
language sql stable as $$
  select jsonb_build_object('name', p.name, 'kind', p.kind, 'settings', p.settings, 'active', p.active, 'secrets', coalesce(
           (select jsonb_agg(jsonb_build_object('field', s.field, 'slot', s.slot, 'key_id', s.key_id,
                                                'nonce', encode(s.nonce, 'hex'), 'ciphertext', encode(s.ciphertext, 'hex'))
                             order by s.field, s.slot)
              from tallybook.provider_secret s where s.provider = p.name), '[]'))
    from tallybook.provider p where p.name = p_name
$$;
