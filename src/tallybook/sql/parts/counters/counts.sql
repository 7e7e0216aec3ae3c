-- counts(): return the number of jobs in each state, per queue and task, and the number that have ever ended in each
-- way.
--
-- It reads sums and adds the changes since the last fold. It therefore costs the same for a hundred jobs and for ten
-- million, and all numbers are from the same moment. They are exact per queue, and per task with one exception: in a
-- queue with several tasks and more than 2,000 available jobs, a job that has run while thousands of others were
-- claimed may be counted as running under another task of that queue, and as available under its own (see _split).
-- completed, cancelled and died count all jobs that have ever ended so, including pruned history; failed, snoozed, lost
-- and moved count attempts whose job continued. A job that is dead because it crashed counts as lost, not as died,
-- because its last attempt ended as lost.
-- A cancelled job counts in its old state until the cancel is recorded at its claim or promotion.
-- Reads total, series, fold, lane, claim, entry, tally; for shared lanes also worker, outcome, tombstone.
-- profile: hot
-- rights: worker, operator, reader, metrics
create or replace function tallybook.counts()
returns table (queue text, task text, scheduled bigint, retrying bigint, waiting bigint, available bigint,
  running bigint, dead bigint, completed bigint, failed bigint, snoozed bigint, cancelled bigint, lost bigint,
  moved bigint, died bigint) language sql stable as $$
  select l.queue, n.task, sum((n.what = 'scheduled')::int * n.n)::bigint, sum((n.what = 'retrying')::int * n.n)::bigint,
         sum((n.what = 'waiting')::int * n.n)::bigint, sum((n.what = 'available')::int * n.n)::bigint,
         sum((n.what = 'running')::int * n.n)::bigint, sum((n.what = 'dead')::int * n.n)::bigint,
         sum((n.what = 'completed')::int * n.n)::bigint, sum((n.what = 'failed')::int * n.n)::bigint,
         sum((n.what = 'snoozed')::int * n.n)::bigint, sum((n.what = 'cancelled')::int * n.n)::bigint,
         sum((n.what = 'lost')::int * n.n)::bigint, sum((n.what = 'moved')::int * n.n)::bigint,
         sum((n.what = 'died')::int * n.n)::bigint
    from tallybook._counted_of(null) n join tallybook.lane l on l.lane_id = n.lane_id
   group by l.queue, n.task
$$;

-- _folded_sums(): the sums up to the last fold. A lane, task and state can have several rows: add them.
create or replace function tallybook._folded_sums() returns setof tallybook.total
language sql stable as $$
  with f as materialized (select x.checkpoint from tallybook.fold x order by x.number desc limit 1)
  select t.* from tallybook.total t where t.checkpoint = (select f.checkpoint from f)
  union all
  select x.number, x.n, x.attempts, x.at, x.lane_id, x.what, x.task from tallybook.series x
   where x.step = 0 and x.number > (select f.checkpoint from f) and x.what not in ('took', 'waited')
$$;

-- _unfolded(): what has changed since the last fold, and when that was.
create or replace function tallybook._unfolded() returns setof tallybook.total
language sql stable as $$
  select f.number, c.n, c.attempts, f.folded_at, c.lane_id, c.what, c.task
    from (select x.* from tallybook.fold x order by x.number desc limit 1) f,
         lateral tallybook._changed(f.hi, null, f.holes, '{}') c
$$;

-- _counted_of(queue): the numbers behind counts, of one queue or (null) of all, by lane, task and state or ending: n,
-- the sum of the attempt numbers, and when a fold found the last change. The number of running jobs of a lane is the
-- number of claimed ones less those of them that have ended. If several tasks share the lane, either its line or its
-- running jobs are read, if possible the line: see _split. The state unattributed: how many running jobs were counted
-- under this task without a look at their own.
-- profile: hot
-- rights: operator, reader, metrics
create or replace function tallybook._counted_of(p_queue text)
returns table (lane_id int, task text, what text, n bigint, attempts bigint, last_at timestamptz)
language plpgsql stable as $$
declare v_lanes int[] := array(select l.lane_id from tallybook.lane l where l.queue = p_queue);
begin
  return query
  with sums as materialized (
    select s.lane_id, s.task, s.what, sum(s.n)::bigint as n, sum(s.attempts)::bigint as attempts,
           max(s.last_at) as last_at
      from (select * from tallybook._folded_sums() union all select * from tallybook._unfolded()) s
     where case when p_queue is null then s.lane_id is not null else s.lane_id = any (v_lanes) end
     group by s.lane_id, s.task, s.what
  ), open as materialized (
    select s.lane_id, s.task,
           sum(case s.what when 'opened' then s.n when 'unclaimed' then 0 else -s.n end)::bigint as n,
           sum(case when s.what = 'opened' then s.attempts else -s.attempts end)::bigint as attempts,
           sum(case s.what when 'opened' then 0 when 'unclaimed' then -s.n else s.n end)::bigint as ended,
           max(s.last_at) filter (where s.what = 'opened') as last_at
      from sums s where s.what not in ('scheduled', 'retrying', 'waiting', 'dead') group by s.lane_id, s.task
  ), lanes as materialized (
    select o.lane_id, sum(o.n)::bigint as n, count(*) filter (where o.n <> 0) as tasks,
           (h.claimed - sum(o.ended))::bigint as running
      from open o
      join tallybook.lane l on l.lane_id = o.lane_id and l.retired_at is null
      cross join lateral tallybook._cursor_of(l.lane_id) h
     group by o.lane_id, h.claimed having sum(o.n) <> 0
  ), shared as materialized (
    select l.*, case when l.tasks = 1 or l.running = 0 or l.running = l.n then null when l.n - l.running <= 2000
           then 'available' else 'running' end as mode
      from lanes l
  ), parts as materialized (
    select l.lane_id, r.task, r.n from shared l, tallybook._split(l.lane_id, l.mode, l.running) r where mode is not null
  ), known as (
    select o.lane_id, o.task, o.n, o.attempts, o.last_at, l.tasks, l.running, l.n as of_lane, l.mode,
           coalesce(r.n, 0) as seen,
           case when row_number() over (partition by o.lane_id order by o.n - coalesce(r.n, 0) desc, o.task) = 1
                then coalesce(x.n, 0) else 0 end as unattributed
      from shared l
      join open o on o.lane_id = l.lane_id and o.n <> 0
      left join parts r on r.lane_id = o.lane_id and r.task = o.task
      left join parts x on x.lane_id = o.lane_id and x.task is null
  ), split as (
    select k.lane_id, k.task, k.n, k.attempts, k.last_at, k.unattributed,
           case when k.tasks = 1 or k.running = 0 then k.running when k.running = k.of_lane then k.n
                when k.mode = 'available' then k.n - k.seen else k.seen + k.unattributed end as running
      from known k
  )
  select s.lane_id, s.task, s.what::text, s.n, s.attempts, s.last_at from sums s
         where s.what not in ('opened', 'unclaimed')
  union all
  select p.lane_id, p.task, 'available', p.n - p.running, p.attempts * (p.n - p.running) / p.n, p.last_at
    from split p where p.n <> p.running
  union all
  select p.lane_id, p.task, 'running', p.running, p.attempts * p.running / p.n, null from split p where p.running <> 0
  union all
  select p.lane_id, p.task, 'unattributed', p.unattributed, 0, null from split p where p.unattributed <> 0;
end $$;

-- _split(lane, mode, running): how many jobs of each task of a lane are in line (mode available: its line is read), or
-- run (mode running: claims are read until that many running jobs are found).
--
-- Running jobs are mostly in the newest claims, and those that have run for long in a worker's oldest open claim. So
-- 3,000 jobs of the newest claims and 2,000 from each worker's oldest claim on are checked; the number of the other
-- running jobs is returned without a task. It reads no more than that, however long a job runs in front of a long line.
-- profile: nested
create or replace function tallybook._split(p_lane_id int, p_mode text, p_running bigint)
returns table (task text, n bigint) language plpgsql stable as $$
declare c record; w record; v_tasks text[] := '{}'; v_seen int := 0; v_low bigint;
begin
  if p_mode = 'available' then
    return query select a.task, a.n from tallybook._line(p_lane_id) a;
    return;
  end if;
  for c in select k.id, k.worker_id, k.number, k.jobs from tallybook.claim k
            where k.lane_id = p_lane_id and k.jobs > 0
              and k.retention = (select l.retention from tallybook.lane l where l.lane_id = p_lane_id)
            order by k.number desc loop
    v_tasks := v_tasks || tallybook._open_tasks(c.worker_id, c.id);
    v_low := c.number; v_seen := v_seen + c.jobs;
    exit when cardinality(v_tasks) >= p_running or v_seen >= 3000;
  end loop;
  for w in select k.id, k.open_from from tallybook.worker k where k.ended_at is null order by k.id loop
    exit when cardinality(v_tasks) >= p_running;
    v_seen := 0;
    for c in select k.id, k.worker_id, k.number, k.jobs, k.lane_id from tallybook.claim k
              where k.worker_id = w.id and k.id >= w.open_from order by k.id loop
      v_seen := v_seen + c.jobs;
      if c.lane_id = p_lane_id and c.number < v_low and c.jobs > 0
         then v_tasks := v_tasks || tallybook._open_tasks(c.worker_id, c.id); end if;
      exit when cardinality(v_tasks) >= p_running or v_seen >= 2000;
    end loop;
  end loop;
  return query select t, count(*) from unnest(v_tasks) t group by t
               union all select null, p_running - cardinality(v_tasks) where p_running > cardinality(v_tasks);
end $$;

-- _open_tasks(worker, claim): the tasks of the open attempts of one claim, one for each attempt.
-- profile: nested
create or replace function tallybook._open_tasks(p_worker int, p_claim bigint) returns text[]
language plpgsql stable as $$
begin
  return array(select e.task from tallybook._open_attempts(p_worker, p_claim, p_claim) a, lateral (
                 select x.task from tallybook.entry x
                  where x.lane_id = a.lane_id and x.retention = a.retention and x.xid = a.xid and x.seq = a.seq
                        limit 1) e);
end $$;
