-- ended(lease, job_id, attempt): how one attempt ended, running while it has not; null: the lease has no such attempt
-- on record.
--
-- For who does not know whether a transaction committed in which the attempt ended: a connection can be lost at COMMIT.
-- What is not committed is not seen; to wait for it, end the attempt: the second end waits for the first, and one is
-- refused.
-- Reads claim, entry, outcome.
-- rights: worker
create or replace function tallybook.ended(lease uuid, job_id bigint, attempt int) returns text
language sql stable
-- profile: lookup
as $$
  select coalesce((select o.state::text from tallybook.outcome o
                    where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq limit 1), 'running')
    from tallybook._lease_entries(array[ended.lease], array[ended.job_id], array[ended.attempt]) h
$$;
