-- pick(queue, max_jobs, lock, version): claim the next jobs of a queue without a worker record or a heartbeat: at most
-- max_jobs (1 to 10000), each with the lease that complete, fail, snooze and subject_reschedule need.
--
--   lock   how long the caller holds the jobs, 1 s to 7 days. Jobs that have not ended then are rescued, at most a
--          quarter of that time later, like a dead worker's jobs.
--   version  only jobs whose args have this version, 1 to 999; others are set aside once, without a failure, for
--            callers that know their version: see move. null: all versions, except jobs that were set aside
--   lease, job_id, attempt   identify the attempt
--   unique_key, options      a subject's name, and the options of the enqueue
--   start_at                 do not start the job before this time, which a rate limit has set; usually now
--   locked_until             the caller holds the job at least until then
-- Call it in a transaction of its own, because it holds the lane until the commit. It can return fewer jobs than there
-- are, even none: it ends cancelled jobs, and sets aside jobs that wait for a limit or an order key. A job that is
-- cancelled before pick's commit can be returned; the caller may still run and end it. If a producer changes a queued
-- job with a unique key or of a subject, or relies on its being queued (on_conflict, unique_while, subject_upsert,
-- subject_forget), it waits for an open pick of the job's lane. If pick has returned the job, the producer then finds
-- it running: see _start_waits.
-- It does not promote or rescue: also run at least one worker, or call the services.
-- Errors: TB003 isolation level, TB005 invalid numbers, or a limit without a rule. Locks: see claim and admit. Reads
-- and writes worker; see worker_start, claim, claimed_jobs and admit.
-- rights: worker
create or replace function tallybook.pick(queue text, max_jobs int default 1, lock interval default '5 min',
  at timestamptz default clock_timestamp(), version int default null)
returns table (lease uuid, job_id bigint, attempt int, task text, args jsonb, headers jsonb, failures int,
               unique_key text, options jsonb, enqueued_at timestamptz, start_at timestamptz, locked_until timestamptz)
language plpgsql as $$
declare v_worker int; v_taken int; v_blocked text; a record; v_name text := concat_ws(', version ', 'pick', version);
begin
  perform tallybook._check_range('max_jobs', max_jobs::text, max_jobs between 1 and 10000, 'Use 1 to 10000.');
  perform tallybook._check_range('lock', lock::text, lock between '1 s' and '7 days', 'It must be from 1 s to 7 days.');
  perform tallybook._check_range('version', version::text, coalesce(version between 1 and 999, true),
                                 'It is 1 to 999.');
  -- One record serves all picks in a quarter of the time, with a longer lease.
  select w.id into v_worker from tallybook.worker w
   where w.ended_at is null and w.name = v_name and w.queues = array[pick.queue] and w.lease = lock * 1.25
     and w.seen_at between pick.at - lock * 0.25 and pick.at order by w.id limit 1;
  if not found then
    v_worker := tallybook.worker_start(v_name, array[pick.queue], lease => lock * 1.25, at => pick.at);
  end if;
  if version is not null then  -- jobs of this version that others have set aside: see move
    update tallybook.worker w set parts = p.parts
      from (select '{turn,fair}' || array_agg(distinct l.part order by l.part) as parts from tallybook.lane l
             where l.queue = pick.queue and starts_with(l.part, case version when 1 then 'task:'
                                                                else format('version:%s:', version) end)) p
     where w.id = v_worker and w.parts <> p.parts;
  end if;
  perform pg_advisory_xact_lock_shared(1413565446, 65);  -- its jobs are read before its commit: see _start_waits
  lease := gen_random_uuid(); locked_until := pick.at + lock;
  select c.jobs into v_taken
    from tallybook.claim(v_worker, array[pick.queue], array[max_jobs], lease, at => pick.at, retried => false) c;
  if coalesce(v_taken, 0) = 0 then return; end if;
  for job_id, attempt, task, args, headers, failures, unique_key, options, enqueued_at, v_blocked in
    select j.job_id, j.attempt, j.task, j.args, j.headers, j.failures, j.unique_key, j.options, j.enqueued_at,
           j.blocked_by from tallybook.claimed_jobs(lease, at => pick.at) j loop
    start_at := pick.at;
    if coalesce(options ->> 'version', '1') <> version::text then
      perform tallybook.move(lease, job_id, attempt, pick.at);
      continue;
    end if;
    if v_blocked is not null then
      select x.* into a from tallybook.admit(array[lease], array[job_id], array[attempt], array[v_blocked],
                                             patient => false, at => pick.at) x;
      perform tallybook._refuse(a.verdict = 'unknown',
        format('job %s names the limit %s, which has no rule', job_id, a.said),
        'Create it with tallybook limit set, or concurrency_limit_set.');
      if a.verdict = 'wait' then perform tallybook.unclaim(lease, job_id, attempt, interval '1 s', pick.at); end if;
      continue when a.verdict is distinct from 'start';
      start_at := pick.at + make_interval(secs => a.starts_in);
    end if;
    return next;
  end loop;
end $$;
