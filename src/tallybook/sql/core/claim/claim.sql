-- claim(worker, queues, max_jobs, lease, ...): claim the next jobs of some queues for a worker: one batch from one
-- lane.
--
-- Checks the lanes of the queues, lowest priority number first. From the first lane that has jobs, it takes the next
-- ones after the lane's cursor: at most max_jobs[i] for queues[i] (0: none). Within a priority, the lane of jobs whose
-- turn at a limit has come is first. The ids are not returned: commit, then read them with claimed_jobs, so that
-- nothing slow happens while the lane is locked. A job whose transaction commits late is claimed late, never skipped:
-- see "holes" in sql/README.md.
--   lease    a random UUID from the caller, which is needed to end these attempts
--   durable  false: this transaction commits asynchronously. A crash of the server can then undo the claim: its jobs
--            are claimed again, and its lease is refused. Use it only in a transaction that does nothing else.
--   retried  false: this is the first call with this lease, so it does not search for an earlier result
-- Returns the claim's id (for renew), the queue and the number of jobs. A null id means that no job was available.
-- An id with 0 jobs means that all jobs it found were cancelled: claim again. A second call with the same lease returns
-- the same result.
-- It may take fewer jobs than there are, because it takes from one window of the lane only (see sql/README.md). Claim
-- once per transaction: a second claim would wait for a lane while the first one still locks another.
-- Errors: TB003 isolation level, TB004 another cluster's cursor, TB005 no lease, TB006 a worker that is considered
-- dead. Locks, in this order: the worker's gate, then the first lane, for which it waits. If another session has
-- emptied that lane meanwhile, it tries up to 7 other lanes. It keeps all these locks until its commit. Reads lane,
-- queue, worker, claim, entry, tombstone; writes claim, for cancelled jobs outcome and tally; deletes from tombstone.
-- profile: hot
-- rights: worker
create or replace function tallybook.claim(worker int, queues text[], max_jobs int[], lease uuid,
  durable boolean default true, at timestamptz default clock_timestamp(), retried boolean default true,
  out claim_id bigint, out queue text, out jobs int) language plpgsql as $$
declare
  v_parts text[]; v_tried int[] := '{}'; v_lane int; v record; x record; v_rank int;
  v_next xid8; v_xid xid8; v_lanes int;
begin
  if lease is null then raise exception 'a claim needs a lease' using errcode = 'TB005'; end if;
  v_parts := tallybook._lock_worker(worker);
  if retried then  -- after a lost connection: the answer of the first time
    -- Without a join: beside one, a plan that is made while the table is empty may read all of another index, for ever.
    select c.id, c.lane_id, c.jobs into claim_id, v_lane, jobs
      from tallybook.claim c where c.lease = claim.lease limit 1;
    if found then
      select l.queue into queue from tallybook.lane l where l.lane_id = v_lane;
      return;
    end if;
  end if;
  if not durable then queue := set_config('synchronous_commit', 'off', true); queue := null; end if;
  for turn in 1..8 loop
    v_next := null; v_rank := null; v_lanes := 0;
    -- A loop costs half of what one statement with a call of _next for each lane costs, and ends at the first rank that
    -- has work.
    for x in
      select l.lane_id, l.retention, l.born, l.queue, n.max_jobs, 2 * l.priority + (l.part <> 'turn')::int as rank
        from unnest(queues, max_jobs) with ordinality as n(queue, max_jobs, place)
        join tallybook.lane l on l.queue = n.queue and l.retired_at is null
        left join tallybook.queue q on q.name = n.queue
       where n.max_jobs > 0 and (l.part = '' or l.part = any (v_parts)) and q.paused_at is null
         and l.lane_id <> all (v_tried)
       order by rank, n.place loop
      exit when x.rank > v_rank;
      v_lanes := v_lanes + 1;
      if v_lanes > 10 then
        select f.* into v from tallybook._first_lane(queues, max_jobs, v_parts, v_tried) f;
        v_next := v.xid;
        exit;
      end if;
      v_xid := tallybook._next(x.lane_id, x.retention, x.born);
      if v_xid < v_next or v_next is null and v_xid is not null then
        v := x; v_next := v_xid; v_rank := x.rank;
      end if;
    end loop;
    exit when v_next is null;
    -- Only the first lane is waited for: two claimers that met two lanes in opposite order would deadlock.
    if turn = 1 then
      -- It is tried for a while before it is waited for: handed to one that sleeps, it would be idle until that one
      -- runs.
      for try in 1..30 loop
        exit when pg_try_advisory_xact_lock(1413565441, v.lane_id);
        if try < 30 then perform pg_sleep(0.001); else perform pg_advisory_xact_lock(1413565441, v.lane_id); end if;
      end loop;
    elsif not pg_try_advisory_xact_lock(1413565441, v.lane_id) then
      v_tried := v_tried || v.lane_id;
      continue;
    end if;
    -- while we waited
    if exists (select from tallybook.queue q where q.name = v.queue and q.paused_at is not null) then
      v_tried := v_tried || v.lane_id;
      continue;
    end if;
    select t.claim_id, t.jobs into claim_id, jobs
      from tallybook._take(v.lane_id, v.retention, v.born, v.max_jobs, worker, lease, v_next, at) t;
    if claim_id is not null then  -- with jobs = 0: all it met was cancelled; there may be more behind
      queue := v.queue;
      return;
    end if;
    v_tried := v_tried || v.lane_id;  -- somebody was quicker
  end loop;
  claim_id := null; jobs := 0;
end $$;
