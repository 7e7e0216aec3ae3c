-- _wake(queue): tells the workers that sleep on this queue, if there are any, when the caller's transaction commits.
--
-- NOTIFY takes one lock for the whole cluster at commit, so it is sent only while somebody sleeps: a sleeper holds an
-- advisory lock (class 1413565444), and who cannot take it for a moment knows. Both calls are one expression, so that a
-- cancelled statement cannot leave it locked. A sleeper that arms itself while this transaction is open would be
-- missed: the gate (class 1413565445), shared until commit, tells it to look again (see listen_begin). There are 128
-- gates, whatever the number of queues, so that a transaction that serves thousands of them does not fill the server's
-- table of locks.
-- "set tallybook.notify = off" (for a role, a database or a session) switches it off: a transaction that notified
-- cannot be prepared for two-phase commit. Workers poll anyway.
create or replace function tallybook._wake(p_queue text) returns void
language plpgsql as $$
declare
  v_key int := hashtext(p_queue); v_done boolean;
begin
  if current_setting('tallybook.notify', true) = 'off' then return; end if;
  v_done := pg_advisory_xact_lock_shared(1413565445, v_key & 127) is null;
  if not (pg_try_advisory_lock(1413565444, v_key) and pg_advisory_unlock(1413565444, v_key)) then
    perform pg_notify('tallybook', p_queue);
  end if;
end $$;
