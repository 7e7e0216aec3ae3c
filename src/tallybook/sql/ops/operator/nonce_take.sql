-- nonce_take(key, nonce, signed_at): whether a signed request of this key may be served: fresh, and from now on its
-- nonce is used up;
-- used: it was served before; late or early: it was signed more than 300 s ago or ahead, by the clock of this database.
--
-- Call it in the transaction of what the request does. Of two that bring one nonce at the same moment the second waits
-- for the first to end: it is used if that one committed, and fresh if it left nothing. A nonce is kept for 600 s, as
-- long as what was signed 300 s ahead stays in time; the sweep takes it away then. Errors: TB005 a key or nonce that is
-- empty or longer than 200. Writes api_nonce.
-- rights: operator
create or replace function tallybook.nonce_take(key text, nonce text, signed_at timestamptz,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  c_window constant interval := '300 s';
begin
  perform tallybook._refuse((length(key) between 1 and 200 and length(nonce) between 1 and 200) is not true,
                            'key and nonce have from 1 to 200 characters');
  if signed_at is null or signed_at < at - c_window then return 'late'; end if;
  if signed_at > at + c_window then return 'early'; end if;
  insert into tallybook.api_nonce (key_id, nonce, seen_at)
    values (nonce_take.key, nonce_take.nonce, nonce_take.at) on conflict do nothing;
  return case when found then 'fresh' else 'used' end;
end $$;
