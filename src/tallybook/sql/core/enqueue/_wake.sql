-- _wake(queue): wake the workers that sleep on this queue, if there are any, when the caller's transaction commits.
--
-- NOTIFY takes one lock of the whole cluster at commit, so it is sent only while a worker sleeps. A sleeper holds an
-- advisory lock (class 1413565444); a producer that cannot take it for a moment knows that somebody sleeps. Both calls
-- are one expression, so a cancelled statement cannot leave it locked. A sleeper that is armed while this transaction
-- is open would be missed; the gate (class 1413565445), shared until commit, makes it look again (see listen_begin).
-- There are 128 gates for all queues, so a transaction that serves thousands of queues does not fill the server's table
-- of locks.
-- "set tallybook.notify = off" (for a role, a database or a session) switches it off, because a transaction that
-- notified cannot be prepared for two-phase commit. Workers poll anyway.
create or replace function tallybook._wake(p_queue text) returns void
language plpgsql as $$
declare v_key int := hashtext(p_queue); v_done boolean;
begin
  if current_setting('tallybook.notify', true) = 'off' then return; end if;
  v_done := pg_advisory_xact_lock_shared(1413565445, v_key & 127) is null;
  if not (pg_try_advisory_lock(1413565444, v_key) and pg_advisory_unlock(1413565444, v_key)) then
    perform pg_notify('tallybook', p_queue);
  end if;
end $$;
