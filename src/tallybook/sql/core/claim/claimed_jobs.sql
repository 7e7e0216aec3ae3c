-- claimed_jobs(lease, job, at): read the jobs of a claim. Run it after the claim has committed. It keeps no lock.
--
-- blocked_by is null for nearly all jobs: start them. Otherwise the job must not start, at least not yet, and admit
-- decides:
--   cancelled  the job was cancelled after the claim read it. Tombstones are read after the claim's commit, so no
--              cancel that committed before this call is missed. A cancel of a later attempt counts, too: this attempt
--              was lost meanwhile, and its worker does not know that yet
--   expired    the job's expires_at has passed, so no attempt may start
--   changing   a producer's open transaction is about to change the job, or relies on it being queued
--   postponed  the job was moved to a later time after the claim
--   order_key  it may not be the job's turn
--   limit      a limit holds the job back, or may do so
-- If blocked_by is null and options contain turn, the job holds permits: when it has ended, call concurrency_release()
-- with the names of its limits.
-- max_attempts null: the task's limit applies. run_at null: the job was to run at once.
-- job: read only this job of the claim. Unless blocked_by is changing, what a producer was told about the job is final.
-- Returns no rows if no claim has this lease: the claim took no jobs, or a crash of the server has undone it. Errors:
-- TB003.
-- Reads claim, entry, tombstone; for jobs with a unique key amendment; see _is_limited.
-- The query's LIMIT is the claim's number of jobs. Without it, each claim from a big transaction would read all later
-- jobs of that transaction, because a scan does not end at a row's second column.
-- profile: nested
-- rights: worker
create or replace function tallybook.claimed_jobs(lease uuid, job bigint default null,
  at timestamptz default clock_timestamp())
returns table (job_id bigint, attempt int, task text, args jsonb, headers jsonb, queue text, priority int, failures int,
  crashes int, max_attempts int, unique_key text, enqueued_at timestamptz, run_at timestamptz, order_key text,
  options jsonb, blocked_by text) language plpgsql as $$
declare
  c tallybook.claim; v_queue text; v_priority int; v_dead boolean := exists (select from tallybook.tombstone);
  v_wide boolean := tallybook._has_limits(true);
begin
  perform tallybook._read_committed('claimed_jobs needs READ COMMITTED', 'An older snapshot misses newer changes.');
  select k.* into c from tallybook.claim k where k.lease = claimed_jobs.lease;
  if not found then return; end if;
  select l.queue, l.priority into v_queue, v_priority from tallybook.lane l where l.lane_id = c.lane_id;
  if c.one_xid is not null then  -- an interval of one
    c.closed := array[c.one_xid]; c.from_xid := c.one_xid; c.from_seq := c.one_seq - 1; c.pos_xid := c.one_xid;
    c.pos_seq := c.one_seq;
  end if;
  return query
  select e.job_id, e.attempt, e.task, coalesce((e.a).args, e.args), e.headers, v_queue, v_priority, e.failures::int,
         e.crashes::int, e.max_attempts::int, e.unique_key, e.enqueued_at, e.run_at, e.order_key,
         case when (e.a).args is null then e.options else tallybook._versioned(e.options, (e.a).version) end,
         case when v_dead and exists (select from tallybook.tombstone t
                                       where t.job_id = e.job_id and (t.attempt = e.attempt or not t.once)
                                             and t.cancelled)
                or (e.a).cancelled then 'cancelled'
              when e.expires_at <= claimed_jobs.at then 'expired'
              when (e.a).busy then 'changing'
              when (e.a).run_at > claimed_jobs.at then 'postponed'
              when e.order_key is not null then 'order_key'
              when e.options ? 'limits' and not e.options ? 'turn' then 'limit'
              when e.options ? 'limits' or v_wide  -- no "and": of a job without options this is null
              then case when tallybook._is_limited(v_queue, e.task, e.options, e.xid, e.seq) then 'limit' end end
    from (
      select x.*, case when x.unique_key is not null then  -- it can have been changed
               tallybook._amendment_state(x.job_id, x.task, (select tallybook._crowd())) end as a
        from (
          (select x.* from unnest(c.closed) i(xid), lateral (  -- a join could begin with the whole lane
             select y.* from tallybook.entry y where y.lane_id = c.lane_id and y.retention = c.retention
                and y.xid = i.xid and (y.xid, y.seq) > (c.from_xid, c.from_seq)
                and (y.xid, y.seq) <= (c.pos_xid, c.pos_seq) and y.seq <> all (c.skipped)
                and (claimed_jobs.job is null or y.job_id = claimed_jobs.job) offset 0) x
            order by x.xid, x.seq)
          union all
          (select x.* from tallybook.entry x
            where c.closed = '{}' and x.lane_id = c.lane_id and x.retention = c.retention
              and x.xid >= c.from_xid and (x.xid, x.seq) > (c.from_xid, c.from_seq)
              and x.xid <= c.pos_xid and (x.xid, x.seq) <= (c.pos_xid, c.pos_seq)
              and x.xid <> all (c.holes) and x.seq <> all (c.skipped)
              and (claimed_jobs.job is null or x.job_id = claimed_jobs.job)
            order by x.xid, x.seq limit case when claimed_jobs.job is null then c.jobs else 1 end)) x offset 0) e;
end $$;
