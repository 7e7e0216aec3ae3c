-- job: every job of every state, with plain columns. For people, pages and debugging; a look-up by id uses indexes
-- only.
--
-- A job is where it is: in scheduled, in dead, or its newest entry, whose state follows from the claims and the
-- outcome. attempts is how often it was started. unserved: its task is known to no worker that lives.
-- rights: operator; reader (id, queue, task, state, priority, attempt, attempts, failures, crashes, max_attempts,
--   enqueued_at, run_at, started_at, ended_at, worker_id, worker, unserved, expires_at, progress)
create or replace view tallybook.job as
select j.job_id as id, j.queue, j.task, j.state, j.priority, j.args, j.headers, j.attempt,
       j.attempt - j.unstarted - tallybook._unstarted_attempts(j.job_id, j.attempt) as attempts,
       j.failures::int, j.crashes::int, j.max_attempts::int,
       case when j.options ? 'subject' then null else j.unique_key end as unique_key, j.enqueued_at, j.run_at,
       j.started_at, j.ended_at, j.worker_id, j.worker, j.reason, j.errors -> -1 ->> 'message' as last_error, j.errors,
       j.unserved, j.order_key, j.expires_at, tallybook.summary(j.task, j.args) as summary, j.result,
       (select p.done from tallybook.progress p where p.job_id = j.job_id) as progress,
       (select p.message from tallybook.progress p where p.job_id = j.job_id) as progress_message, j.options,
       case when j.options ? 'subject' then j.unique_key end as subject, j.headers -> 'links' as links
  from (
    select s.job_id, l.queue, s.task,
           case when t.cancelled then 'cancelled' when s.failures > 0 then 'retrying' else 'scheduled' end as state,
           l.priority::int, s.args, s.headers, s.attempt, 1 as unstarted, s.failures, s.crashes, s.max_attempts,
           s.unique_key, s.enqueued_at, s.run_at, null::timestamptz as started_at, null::timestamptz as ended_at,
           null::int as worker_id, null::text as worker, t.reason, s.errors, false as unserved, s.order_key,
           s.expires_at, null::jsonb as result, s.options
      from tallybook.scheduled s
      join tallybook.lane l on l.lane_id = s.lane_id
      left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                          where t.job_id = s.job_id and (t.attempt = s.attempt or t.attempt < s.attempt and not t.once)
                                and t.cancelled limit 1) t on true
    union all
    select w.job_id, l.queue, w.task, case when t.cancelled then 'cancelled' else 'waiting' end, l.priority::int,
           w.args, w.headers, w.attempt, 1, w.failures, w.crashes, w.max_attempts, w.unique_key, w.enqueued_at,
           w.run_at, null, null, null, null,
           coalesce(t.reason, case
             when w.options ? 'held' then
               format(case when exists (select from tallybook.breaker_state b
                                         where b.name = w.options ->> 'held' and b.state <> 'closed')
                           then 'the breaker of %s is open' else 'the permits of the limit %s are taken' end,
                      to_json(w.options ->> 'held'))
             when w.fair_key is not null then
               format('the turn of %s among the keys of its queue has not come', to_json(w.fair_key::text))
             when w.order_key is null then tallybook._waits_for(w.job_id)
             else format('another job with the order key %s is before it', to_json(w.order_key)) end),
           w.errors, false, coalesce(w.order_key, w.options #>> '{parents,order_key}'), w.expires_at, null, w.options
      from tallybook.waiting w
      join tallybook.lane l on l.lane_id = w.lane_id
      left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                          where t.job_id = w.job_id and (t.attempt = w.attempt or t.attempt < w.attempt and not t.once)
                                and t.cancelled limit 1) t on true
    union all
    select d.job_id, l.queue, d.task, 'dead', l.priority::int, d.args, d.headers, d.attempt,
           (d.reason = 'expired')::int, d.failures, d.crashes, d.max_attempts, d.unique_key, d.enqueued_at, null, null,
           d.died_at, null, null, d.reason, d.errors, false, d.order_key, d.expires_at, null, d.options
      from tallybook.dead d
      join tallybook.lane l on l.lane_id = d.lane_id
    union all
    select e.job_id, l.queue, e.task,
           case when o.state is not null then o.state::text when c.lease is not null then 'running'
                when t.cancelled then 'cancelled' else 'available' end,
           l.priority::int, g.args, e.headers, e.attempt, (c.lease is null)::int, e.failures, e.crashes, e.max_attempts,
           e.unique_key, e.enqueued_at, coalesce(e.run_at, e.enqueued_at), c.claimed_at, o.ended_at, c.worker_id,
           w.name, coalesce(o.error ->> 'message', t.reason), e.errors,
           o.state is null and c.lease is null and l.part not in ('', 'turn', 'fair')
             and not exists (select from tallybook.worker k where k.ended_at is null and l.part = any (k.parts)
                             and l.queue = any (k.queues)),
           e.order_key, e.expires_at, o.result, e.options
      from tallybook.entry e
      join tallybook.lane l on l.lane_id = e.lane_id
      left join lateral (  -- one at a time: a join reads all outcomes while the planner does not know how many they are
        select o.state, o.error, o.ended_at, o.result from tallybook.outcome o
         where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true
      left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                          where o.state is null and t.job_id = e.job_id and t.cancelled
                                and (t.attempt = e.attempt or t.attempt < e.attempt and not t.once) limit 1) t on true
      left join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true
      cross join lateral (select case when e.unique_key is null then e.args else coalesce((
                            select a.args from tallybook.amendment a where a.job_id = e.job_id), e.args) end as args) g
      left join tallybook.worker w on w.id = c.worker_id
     where (o.state is null or o.state in ('completed', 'cancelled'))
       and (o.state is distinct from 'cancelled' and t.cancelled is not true
            -- Scalar, with a limit: "not exists" is hashed, with all rows of these tables, where the planner takes them
            -- for small.
            or coalesce(
              (select false from tallybook.entry n where n.job_id = e.job_id and n.attempt > e.attempt limit 1),
              (select false from tallybook.scheduled n where n.job_id = e.job_id limit 1),
              (select false from tallybook.waiting n where n.job_id = e.job_id limit 1), true))) j;
comment on view tallybook.job is 'Every job of every state. A look-up by id is an index look-up.';
