-- nonce_take(key, nonce, signed_at): check a signed request and use up its nonce.
--
-- Returns fresh: serve it; used: it was served before; late or early: it was signed more than 300 s before or after
-- now, by the clock of this database. Call it in the transaction of the request's change. Of two requests with the same
-- nonce, the second waits for the first. It gets used if the first commits, and fresh if the first rolls back. A nonce
-- is kept for 600 s, which covers requests signed 300 s ahead; the sweep deletes it then. Errors: TB005 a key or nonce
-- that is empty or longer than 200. Writes api_nonce.
-- rights: operator
create or replace function tallybook.nonce_take(key text, nonce text, signed_at timestamptz,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare c_window constant interval := '300 s';
begin
  perform tallybook._refuse((length(key) between 1 and 200 and length(nonce) between 1 and 200) is not true,
                            'key and nonce have from 1 to 200 characters');
  if signed_at is null or signed_at < at - c_window then return 'late'; end if;
  if signed_at > at + c_window then return 'early'; end if;
  insert into tallybook.api_nonce (key_id, nonce, seen_at)
    values (nonce_take.key, nonce_take.nonce, nonce_take.at) on conflict do nothing;
  return case when found then 'fresh' else 'used' end;
end $$;
