-- _provider_secret_set(provider, field, was, key id, nonce, ciphertext, previous ...): set a secret.
--
-- `was` is the nonce of the current ciphertext that the caller has read, or null. Returns false if another program has
-- set or rotated it since: read again. The slot `previous` gets the former secret, encrypted again, or is emptied.
-- Errors: TB002 unknown provider. Writes provider_secret.
-- rights: operator
create or replace function tallybook._provider_secret_set(p_provider text, p_field text, p_was bytea, p_key_id text,
  p_nonce bytea, p_ciphertext bytea, p_former_key_id text, p_former_nonce bytea, p_former_ciphertext bytea,
  p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
declare v_set_at timestamptz;
begin
  perform tallybook._check_name('field of a secret', p_field, 64);
  perform from tallybook.provider p where p.name = p_provider for key share;
  perform tallybook._refuse(not found, format('there is no provider %s', coalesce(to_json(p_provider)::text, 'null')),
                            null, 'TB002');
  if p_was is null then
    insert into tallybook.provider_secret (provider, field, slot, key_id, nonce, ciphertext, set_at, sealed_at)
    values (p_provider, p_field, 'current', p_key_id, p_nonce, p_ciphertext, p_at, p_at) on conflict do nothing;
    if not found then return false; end if;
  else
    -- All changes of a secret lock this row first, so the slot previous has one writer.
    select s.set_at into v_set_at from tallybook.provider_secret s
     where s.provider = p_provider and s.field = p_field and s.slot = 'current' and s.nonce = p_was for update;
    if not found then return false; end if;
    update tallybook.provider_secret s
       set key_id = p_key_id, nonce = p_nonce, ciphertext = p_ciphertext, set_at = p_at, sealed_at = p_at
     where s.provider = p_provider and s.field = p_field and s.slot = 'current';
  end if;
  delete from tallybook.provider_secret s where s.provider = p_provider and s.field = p_field and s.slot = 'previous';
  if p_former_ciphertext is not null then
    insert into tallybook.provider_secret (provider, field, slot, key_id, nonce, ciphertext, set_at, sealed_at)
    values (p_provider, p_field, 'previous', p_former_key_id, p_former_nonce, p_former_ciphertext, v_set_at, p_at);
  end if;
  return true;
end $$;

-- _provider_secret_reseal(provider, field, slot, was, key id, nonce, ciphertext): encrypt a secret with another key.
--
-- Returns false if it has changed since the caller read it, or if another open transaction holds it. Never waits.
-- rights: operator
create or replace function tallybook._provider_secret_reseal(p_provider text, p_field text, p_slot text, p_was bytea,
  p_key_id text, p_nonce bytea, p_ciphertext bytea, p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  update tallybook.provider_secret s set key_id = p_key_id, nonce = p_nonce, ciphertext = p_ciphertext, sealed_at = p_at
   where s.ctid = any (array(
     select x.ctid from tallybook.provider_secret x where x.provider = p_provider and x.field = p_field
        and x.slot = p_slot and x.nonce = p_was for update skip locked));
  return found;
end $$;

-- _provider_secret_drop(provider, field, slot): delete one slot of a secret, or both if slot is null. Returns false if
-- there was none.
-- rights: operator
create or replace function tallybook._provider_secret_drop(p_provider text, p_field text, p_slot text) returns boolean
language plpgsql as $$
begin
  perform from tallybook.provider_secret s where s.provider = p_provider and s.field = p_field
          order by s.slot for update;
  delete from tallybook.provider_secret s
   where s.provider = p_provider and s.field = p_field and s.slot = coalesce(p_slot, s.slot);
  return found;
end $$;
