-- claim_job(worker, job_id, lease): claim one job by its id. Returns true for exactly one of all concurrent callers.
--
-- For a program or a user that has chosen the job. The job may be available, or scheduled and due. Its lane's cursor
-- does not move and later skips the job. Run it in a transaction of its own, because it holds the lane's lock.
-- Returns false if the job is not due, waiting, claimed, ended or cancelled, if its queue is paused, or if its lane or
-- the worker was busy for 2 s. A second call with the same lease returns the same result. Errors: TB002 no such job,
-- TB003, TB005 no lease, TB006. Locks, in this order: the worker's gate, the job's row in scheduled (tried), its
-- tombstone, its lane. Reads scheduled, entry, outcome, queue; writes entry, order_line, tombstone, claim; deletes from
-- scheduled.
-- profile: lookup
-- rights: worker
create or replace function tallybook.claim_job(worker int, job_id bigint, lease uuid,
  at timestamptz default clock_timestamp())
returns boolean language plpgsql
set lock_timeout = '2s'  -- who holds the lane may stay open
as $$
declare e tallybook.entry; v_due tallybook.scheduled; h record;
begin
  if lease is null then raise exception 'a claim needs a lease' using errcode = 'TB005'; end if;
  perform tallybook._lock_worker(worker);
  if exists (select from tallybook.claim c where c.lease = claim_job.lease) then  -- said twice
    return exists (select from tallybook.claim c join tallybook.entry x on x.xid = c.one_xid and x.seq = c.one_seq
                    where c.lease = claim_job.lease and x.job_id = claim_job.job_id);
  end if;
  loop
    delete from tallybook.scheduled y
     where y.job_id = (select x.job_id from tallybook.scheduled x  -- a producer that changes it may stay open
                        where x.job_id = claim_job.job_id and x.run_at <= claim_job.at for update skip locked)
       and not exists (select from tallybook._cancel_of(y.job_id, y.attempt))
    returning y.* into v_due;
    if found then
      e := tallybook._entry_of(to_jsonb(v_due));
      insert into tallybook.entry values (e.*);
      perform tallybook._line_up_many(array[e.order_key], array[e.job_id], array[e.seq]) where e.order_key is not null;
    end if;
    select x.* into e from tallybook.entry x where x.job_id = claim_job.job_id order by x.attempt desc limit 1;
    exit when found;
    if exists (select from tallybook._aside a where a.job_id = claim_job.job_id) then return false; end if;
    perform tallybook._check_job(claim_job.job_id);  -- it has just come into line: look again
  end loop;
  -- The tombstone comes before the lane's lock: it may have to wait for a user's transaction that cancelled this job.
  insert into tallybook.tombstone (job_id, attempt, taken, created_at)
    values (claim_job.job_id, e.attempt, true, claim_job.at) on conflict do nothing;
  if not found then return false; end if;
  perform pg_advisory_xact_lock(1413565441, e.lane_id);
  if tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
     or exists (select from tallybook._cancel_of(claim_job.job_id, e.attempt))
     or exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
     or exists (select from tallybook.lane l join tallybook.queue q on q.name = l.queue
                 where l.lane_id = e.lane_id and q.paused_at is not null) then
    delete from tallybook.tombstone t where t.job_id = claim_job.job_id and t.attempt = e.attempt;
    return false;
  end if;
  select c.* into h from (select 1) one left join lateral (select k.* from tallybook.claim k
    where k.lane_id = e.lane_id and k.retention = e.retention order by k.number desc limit 1) c on true;
  insert into tallybook.claim (id, number, lo, hi, from_xid, from_seq, pos_xid, pos_seq, one_xid, one_seq, claimed,
                               claimed_at, lease, lane_id, worker_id, jobs, retention, holes, closed)
  select nextval('tallybook.claim_id'), coalesce(h.number, 0) + 1, coalesce(h.lo, l.born), coalesce(h.hi, l.born),
         coalesce(h.pos_xid, l.born), coalesce(h.pos_seq, 0), coalesce(h.pos_xid, l.born), coalesce(h.pos_seq, 0),
         e.xid, e.seq, coalesce(h.claimed, 0) + 1, claim_job.at, lease, e.lane_id, worker, 1, e.retention,
         coalesce(h.holes, '{}'), coalesce(h.closed, '{}')
    from tallybook.lane l where l.lane_id = e.lane_id;
  return true;
exception when lock_not_available then  -- nothing has happened
  return false;
end $$;
