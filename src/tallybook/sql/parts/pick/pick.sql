-- pick(queue, max_jobs, lock, version): a claim for callers that keep nothing: no worker on record, no heartbeat. The
-- next jobs of a queue, at most max_jobs (1 to 10000), each with the lease that complete, fail, snooze and
-- subject_reschedule want.
--
--   lock   how long they are the caller's, 1 s to 7 days: what has not ended then is rescued, a quarter of that later
--          at most, as the work of a worker that died
--   version  only jobs whose args are of this version, 1 to 999; what else it meets is put aside, once and without a
--            failure, for those that know it: see move. null: of every version, but for what was put aside
--   lease, job_id, attempt   name the attempt
--   unique_key, options      a subject's name, and what enqueue was told
--   start_at                 not before: a rate limit said so; mostly now
--   locked_until             the caller's at least until then
-- Call it in a transaction of its own: it holds the lane until it commits. It may return fewer jobs than there are,
-- even none: what was cancelled, or has to wait for a limit or for its order key, goes where it belongs. A job that is
-- cancelled while pick runs may be returned; nothing that is said of it counts then.
-- Promoting and rescuing are not done here: at least one worker runs beside it, or whoever calls the services.
-- Errors: TB003 isolation level, TB005 wrong numbers, or a limit that has no rule. Locks: see claim and admit. Reads
-- and writes worker; see worker_start, claim, claimed_jobs and admit.
-- rights: worker
create or replace function tallybook.pick(queue text, max_jobs int default 1, lock interval default '5 min',
  at timestamptz default clock_timestamp(), version int default null)
returns table (lease uuid, job_id bigint, attempt int, task text, args jsonb, headers jsonb, failures int,
               unique_key text, options jsonb, enqueued_at timestamptz, start_at timestamptz, locked_until timestamptz)
language plpgsql as $$
declare
  v_worker int; v_taken int; j record; a record; v_name text := concat_ws(', version ', 'pick', version);
begin
  perform tallybook._check_range('max_jobs', max_jobs::text, max_jobs between 1 and 10000, 'It is 1 to 10000.');
  perform tallybook._check_range('lock', lock::text, lock between '1 s' and '7 days', 'It is 1 s to 7 days.');
  perform tallybook._check_range('version', version::text, coalesce(version between 1 and 999, true),
                                 'It is 1 to 999.');
  -- One record stands for all that is picked in a quarter of the time, from its beginning on, with a longer lease.
  select w.id into v_worker from tallybook.worker w
   where w.ended_at is null and w.name = v_name and w.queues = array[pick.queue] and w.lease = lock * 1.25
     and w.seen_at between pick.at - lock * 0.25 and pick.at order by w.id limit 1;
  if not found then
    v_worker := tallybook.worker_start(v_name, array[pick.queue], lease => lock * 1.25, at => pick.at);
  end if;
  if version is not null then  -- what others have put aside of this version: see move
    update tallybook.worker w set parts = p.parts
      from (select '{turn,fair}' || array_agg(distinct l.part order by l.part) as parts from tallybook.lane l
             where l.queue = pick.queue and starts_with(l.part, case version when 1 then 'task:'
                                                                else format('version:%s:', version) end)) p
     where w.id = v_worker and w.parts <> p.parts;
  end if;
  lease := gen_random_uuid(); locked_until := pick.at + lock;
  select c.jobs into v_taken
    from tallybook.claim(v_worker, array[pick.queue], array[max_jobs], lease, at => pick.at, retried => false) c;
  if coalesce(v_taken, 0) = 0 then return; end if;
  for j in select * from tallybook.claimed_jobs(lease, at => pick.at) loop
    job_id := j.job_id; attempt := j.attempt; task := j.task; args := j.args; headers := j.headers;
    failures := j.failures; unique_key := j.unique_key; options := j.options; enqueued_at := j.enqueued_at;
    start_at := pick.at;
    if coalesce(options ->> 'version', '1') <> version::text then
      perform tallybook.move(lease, job_id, attempt, pick.at);
      continue;
    end if;
    if j.blocked_by is not null then
      select x.* into a from tallybook.admit(array[lease], array[job_id], array[attempt], array[j.blocked_by],
                                             patient => false, at => pick.at) x;
      if a.verdict = 'unknown' then
        raise exception 'job % names the limit %, which has no rule', job_id, a.said using errcode = 'TB005',
          hint = 'Make it: tallybook limit set, or concurrency_limit_set.';
      elsif a.verdict = 'wait' then
        perform tallybook.unclaim(lease, job_id, attempt, interval '1 s', pick.at);
      end if;
      continue when a.verdict is distinct from 'start';
      start_at := pick.at + make_interval(secs => a.starts_in);
    end if;
    return next;
  end loop;
end $$;
