-- ended(lease, job_id, attempt): return how an attempt ended: running if it has not; null if the lease has no such
-- attempt.
--
-- For a caller that does not know whether the transaction that ended the attempt has committed, because the connection
-- was lost at COMMIT. It does not see an uncommitted end. To wait for one, end the attempt again: that call waits for
-- the first.
-- Reads claim, entry, outcome.
-- profile: lookup
-- rights: worker
create or replace function tallybook.ended(lease uuid, job_id bigint, attempt int) returns text
language sql stable as $$
  select coalesce((select o.state::text from tallybook.outcome o
                    where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq limit 1), 'running')
    from tallybook._lease_entries(array[ended.lease], array[ended.job_id], array[ended.attempt]) h
$$;
