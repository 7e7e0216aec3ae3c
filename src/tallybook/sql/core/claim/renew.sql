-- renew(worker, open_from, running): send a heartbeat. Returns the running jobs that were cancelled. attempt is set if
-- only that attempt was cancelled, because a user has retried the job since.
--
--   open_from  the lowest claim_id of this worker (see claim) that may have an attempt whose end is not known to be
--              committed; 0 is always correct. A failover may set the ids back, so the stored value is never above the
--              next id.
--   running    the ids of the jobs that it runs now
--   lag, memory  for people: the longest delay of its event loop since the last heartbeat, and its memory in bytes;
--                null: unknown
-- Errors: TB006: the worker is considered dead, and its jobs belong to others. Stop them, and register again with
-- worker_start. Reads tombstone, claim_id; writes worker.
-- profile: lookup
-- rights: worker
create or replace function tallybook.renew(worker int, open_from bigint, running bigint[] default '{}',
  at timestamptz default clock_timestamp(), lag interval default null, memory bigint default null)
returns table (job_id bigint, attempt int, reason text) language plpgsql as $$
#variable_conflict use_column
begin
  update tallybook.worker w set seen_at = renew.at, gone_at = null, lag = renew.lag, memory = renew.memory,
         open_from = greatest(w.open_from, least(coalesce(renew.open_from, 0),
                                                 (select s.last_value + s.is_called::int from tallybook.claim_id s)))
   where w.id = renew.worker and w.ended_at is null;
  if not found then
    raise exception 'worker % is not registered, or was given up', renew.worker using errcode = 'TB006';
  end if;
  return query select t.job_id, case when t.once then t.attempt end, t.reason from tallybook.tombstone t
                where t.cancelled and t.job_id = any (renew.running);
end $$;
