-- _session_gone(worker): whether nobody holds this worker's session: its lock is free. The lock is released at once, so
-- a worker that returns can take it.
create or replace function tallybook._session_gone(p_worker int) returns boolean
language sql as $$ select pg_try_advisory_lock(1413565443, p_worker) and pg_advisory_unlock(1413565443, p_worker) $$;
