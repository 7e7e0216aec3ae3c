-- job: every job of every state, with plain columns, for people, pages and debugging. A look-up by id uses indexes
-- only.
--
-- A job is in scheduled, in dead, or it is its newest entry, whose state follows from the claims and the outcome.
-- attempts counts its starts. unserved: no live worker knows both its task and the version of its args. updated_at:
-- since when it is in its state; last_attempt_at: its last start. Both are computed only for a query that selects them.
--> Every job of every state. A look-up by id is an index look-up.
-- rights: operator; reader (id, queue, task, state, priority, attempt, attempts, failures, crashes, max_attempts,
--   enqueued_at, run_at, started_at, ended_at, worker_id, worker, unserved, expires_at, progress,
--   updated_at, last_attempt_at)
create or replace view tallybook.job as
select j.job_id as id, j.queue, j.task, j.state, j.priority, j.args, j.headers, j.attempt,
       j.attempt - j.unstarted - tallybook._unstarted_attempts(j.job_id, j.attempt) as attempts,
       j.failures::int, j.crashes::int, j.max_attempts::int,
       case when j.options ? 'subject' then null else j.unique_key end as unique_key, j.enqueued_at, j.run_at,
       j.started_at, j.ended_at, j.worker_id, j.worker, j.reason, j.errors -> -1 ->> 'message' as last_error, j.errors,
       j.unserved, j.order_key, j.expires_at, tallybook.summary(j.task, j.args) as summary, j.result,
       (select p.done from tallybook.progress p where p.job_id = j.job_id) as progress,
       (select p.message from tallybook.progress p where p.job_id = j.job_id) as progress_message, j.options,
       case when j.options ? 'subject' then j.unique_key end as subject, j.headers -> 'links' as links,
       coalesce(j.updated_at, tallybook._last_end(j.job_id), j.enqueued_at) as updated_at,
       coalesce(j.started_at, case when j.attempt > j.unstarted
                                   then tallybook._last_start(j.job_id, j.attempt - j.unstarted) end) as last_attempt_at
  from (
    select a.job_id, l.queue, a.task,
           case when t.cancelled then 'cancelled' else a.job_state end as state,
           l.priority::int, a.args, a.headers, a.attempt,
           case when a.place = 'dead' then (a.reason = 'expired')::int else 1 end as unstarted, a.failures, a.crashes,
           a.max_attempts, a.unique_key, a.enqueued_at, a.run_at, null::timestamptz as started_at,
           case when a.place = 'dead' then a.since end as ended_at, null::int as worker_id, null::text as worker,
           coalesce(t.reason, a.reason, case
             when a.place <> 'waiting' then null
             when a.options ? 'held' then
               format(case when exists (select from tallybook.breaker_state b
                                         where b.name = a.options ->> 'held' and b.state <> 'closed')
                           then 'the breaker of %s is open' else 'the permits of the limit %s are taken' end,
                      to_json(a.options ->> 'held'))
             when a.fair_key is not null then
               format('the turn of its fair key %s has not come', to_json(a.fair_key))
             when a.order_key is null then tallybook._waits_for(a.job_id)
             else format('another job with order key %s is before it', to_json(a.order_key)) end) as reason,
           a.errors, false as unserved,
           coalesce(a.order_key, case when a.place = 'waiting' then a.options #>> '{parents,order_key}' end)
             as order_key, a.expires_at, null::jsonb as result, a.options,
           coalesce(t.created_at, a.since, case when a.attempt = 1 then a.enqueued_at end) as updated_at
      from tallybook._aside a
      join tallybook.lane l on l.lane_id = a.lane_id
      left join lateral (select t.cancelled, t.reason, t.created_at from tallybook.tombstone t
                          where a.place <> 'dead' and t.job_id = a.job_id and t.cancelled
                                and (t.attempt = a.attempt or t.attempt < a.attempt and not t.once) limit 1) t on true
    union all
    select e.job_id, l.queue, e.task,
           case when o.state is not null then o.state::text when c.worker_id is not null then 'running'
                when t.cancelled then 'cancelled' else 'available' end,
           l.priority::int, g.args, e.headers, e.attempt, (c.worker_id is null)::int, e.failures, e.crashes,
           e.max_attempts, e.unique_key, e.enqueued_at, coalesce(e.run_at, e.enqueued_at), c.claimed_at, o.ended_at,
           c.worker_id, w.name, coalesce(o.error ->> 'message', t.reason), e.errors,
           o.state is null and c.worker_id is null and l.part not in ('', 'turn', 'fair')
             and not exists (select from tallybook.worker k where k.ended_at is null and l.part = any (k.parts)
                             and l.queue = any (k.queues)),
           e.order_key, e.expires_at, o.result, e.options,
           coalesce(o.ended_at, c.claimed_at, t.created_at, greatest(e.run_at, e.enqueued_at))
      from tallybook.entry e
      cross join lateral (select y.* from tallybook.lane y where y.lane_id = e.lane_id limit 1) l  -- after its entry
      left join lateral (  -- one at a time: a join reads all outcomes while the planner has no statistics
        select o.state, o.error, o.ended_at, o.result from tallybook.outcome o
         where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true
      left join lateral (select t.cancelled, t.reason, t.created_at from tallybook.tombstone t
                          where o.state is null and t.job_id = e.job_id and t.cancelled
                                and (t.attempt = e.attempt or t.attempt < e.attempt and not t.once) limit 1) t on true
      left join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true
      cross join lateral (select case when e.unique_key is null then e.args else coalesce((
                            select a.args from tallybook.amendment a where a.job_id = e.job_id), e.args) end as args) g
      left join tallybook.worker w on w.id = c.worker_id
     where (o.state is null or o.state in ('completed', 'cancelled'))
       and (o.state is distinct from 'cancelled' and t.cancelled is not true
            -- Scalar, with a limit: "not exists" is hashed with all rows of these tables if the planner takes them
            -- for small ones.
            or coalesce(
              (select false from tallybook.entry n where n.job_id = e.job_id and n.attempt > e.attempt limit 1),
              (select false from tallybook.scheduled n where n.job_id = e.job_id limit 1),
              (select false from tallybook.waiting n where n.job_id = e.job_id limit 1), true))) j;
