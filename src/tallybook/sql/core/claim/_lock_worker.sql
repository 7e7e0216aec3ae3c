-- _lock_worker(worker): the first check of every claim: READ COMMITTED, and a worker that has not been given up.
--
-- The lock (class 1413565442) is held until the claim commits. Rescue takes it too, so it never scans while a claim is
-- open, and a repeated claim finds out how the first one ended. The worker's row is read after the lock. Returns the
-- parts of the queues that the worker walks.
create or replace function tallybook._lock_worker(p_worker int) returns text[]
language plpgsql as $$
declare v_parts text[]; v_done boolean;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'claim needs READ COMMITTED, this transaction is %', upper(current_setting('transaction_isolation'))
      using errcode = 'TB003', hint = 'An older snapshot reads an old cursor. Claim in a transaction of its own.';
  end if;
  v_done := pg_advisory_xact_lock(1413565442, p_worker) is null;  -- see enqueue
  select w.parts into v_parts from tallybook.worker w where w.id = p_worker and w.ended_at is null;
  if not found then
    raise exception 'worker % is not registered, or was given up', p_worker
      using errcode = 'TB006', hint = 'Its jobs have been rescued. Start again with worker_start.';
  end if;
  return v_parts;
end $$;
