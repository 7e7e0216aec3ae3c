-- job: every job of every state, with plain columns. For people, pages and debugging; a look-up by id uses indexes
-- only.
--
-- A job is where it is: in scheduled, in dead, or its newest entry, whose state follows from the claims and the
-- outcome. attempts is how often it was started. unserved: its task is known to no worker that lives.
-- rights: operator; reader (id, queue, task, state, priority, attempt, attempts, failures, crashes, max_attempts,
--   enqueued_at, run_at, started_at, ended_at, worker_id, worker, unserved, expires_at, progress)
create or replace view tallybook.job as
select s.job_id as id, l.queue, s.task,
       case when t.cancelled then 'cancelled' when s.failures > 0 then 'retrying' else 'scheduled' end as state,
       l.priority::int, s.args, s.headers, s.attempt, s.attempt - 1 - tallybook._unstarted_attempts(s.job_id,
           s.attempt) as attempts,
       s.failures::int, s.crashes::int, s.max_attempts::int, case when s.options ? 'subject' then null
       else s.unique_key end as unique_key, s.enqueued_at, s.run_at,
       null::timestamptz as started_at, null::timestamptz as ended_at, null::int as worker_id, null::text as worker,
       t.reason, s.errors -> -1 ->> 'message' as last_error, s.errors, false as unserved,
       s.order_key, s.expires_at, tallybook.summary(s.task, s.args) as summary, null::jsonb as result,
       (select p.done from tallybook.progress p where p.job_id = s.job_id) as progress,
       (select p.message from tallybook.progress p where p.job_id = s.job_id) as progress_message, s.options,
       case when s.options ? 'subject' then s.unique_key end as subject, s.headers -> 'links' as links
  from tallybook.scheduled s
  join tallybook.lane l on l.lane_id = s.lane_id
  left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                      where t.job_id = s.job_id and (t.attempt = s.attempt or t.attempt < s.attempt and not t.once)
                            and t.cancelled limit 1) t on true
union all
select w.job_id, l.queue, w.task, case when t.cancelled then 'cancelled' else 'waiting' end,
       l.priority::int, w.args, w.headers, w.attempt, w.attempt - 1 - tallybook._unstarted_attempts(w.job_id,
           w.attempt),
       w.failures::int, w.crashes::int, w.max_attempts::int, case when w.options ? 'subject' then null
       else w.unique_key end, w.enqueued_at, w.run_at,
       null, null, null, null, coalesce(t.reason, case when w.options ? 'held' then
                                 case when exists (select from tallybook.breaker_state b
                                                   where b.name = w.options ->> 'held' and b.state <> 'closed')
                                      then format('the breaker of %s is open', to_json(w.options ->> 'held'))
                                      else format('the permits of the limit %s are taken',
                                                  to_json(w.options ->> 'held')) end
                               when w.fair_key is not null then
                                    format('the turn of %s among the keys of its queue has not come',
                                           to_json(w.fair_key::text))
                               when w.order_key is null then tallybook._waits_for(w.job_id)
                               else format('another job with the order key %s is before it', to_json(w.order_key)) end),
       w.errors -> -1 ->> 'message', w.errors, false,
       coalesce(w.order_key, w.options #>> '{parents,order_key}'), w.expires_at, tallybook.summary(w.task, w.args),
       null,
       (select p.done from tallybook.progress p where p.job_id = w.job_id),
       (select p.message from tallybook.progress p where p.job_id = w.job_id), w.options, case
       when w.options ? 'subject' then w.unique_key end, w.headers -> 'links'
  from tallybook.waiting w
  join tallybook.lane l on l.lane_id = w.lane_id
  left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                      where t.job_id = w.job_id and (t.attempt = w.attempt or t.attempt < w.attempt and not t.once)
                            and t.cancelled limit 1) t on true
union all
select d.job_id, l.queue, d.task, 'dead', l.priority::int, d.args, d.headers, d.attempt,
       d.attempt - tallybook._unstarted_attempts(d.job_id, d.attempt) - (d.reason = 'expired')::int, d.failures::int,
       d.crashes::int, d.max_attempts::int, case when d.options ? 'subject' then null
       else d.unique_key end, d.enqueued_at, null, null, d.died_at, null, null,
       d.reason, d.errors -> -1 ->> 'message', d.errors, false,
       d.order_key, d.expires_at, tallybook.summary(d.task, d.args), null,
       (select p.done from tallybook.progress p where p.job_id = d.job_id),
       (select p.message from tallybook.progress p where p.job_id = d.job_id), d.options, case
       when d.options ? 'subject' then d.unique_key end, d.headers -> 'links'
  from tallybook.dead d
  join tallybook.lane l on l.lane_id = d.lane_id
union all
select e.job_id, l.queue, e.task,
       case when o.state is not null then o.state::text when c.lease is not null then 'running'
            when t.cancelled then 'cancelled' else 'available' end,
       l.priority::int, g.args, e.headers, e.attempt,
       e.attempt - (c.lease is null)::int - tallybook._unstarted_attempts(e.job_id, e.attempt),
       e.failures::int, e.crashes::int, e.max_attempts::int, case when e.options ? 'subject' then null
       else e.unique_key end, e.enqueued_at, coalesce(e.run_at, e.enqueued_at),
       c.claimed_at, o.ended_at, c.worker_id, w.name,
       coalesce(o.error ->> 'message', t.reason), e.errors -> -1 ->> 'message', e.errors,
       o.state is null and c.lease is null and l.part not in ('', 'turn', 'fair')
         and not exists (select from tallybook.worker k where k.ended_at is null and l.part = any (k.parts)
                         and l.queue = any (k.queues)),
       e.order_key, e.expires_at, tallybook.summary(e.task, g.args), o.result,
       (select p.done from tallybook.progress p where p.job_id = e.job_id),
       (select p.message from tallybook.progress p where p.job_id = e.job_id), e.options, case
       when e.options ? 'subject' then e.unique_key end, e.headers -> 'links'
  from tallybook.entry e
  join tallybook.lane l on l.lane_id = e.lane_id
  left join lateral (  -- one at a time: a join reads all outcomes while the planner does not know how many there are
    select o.state, o.error, o.ended_at, o.result from tallybook.outcome o
     where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true
  left join lateral (select t.cancelled, t.reason from tallybook.tombstone t
                      where o.state is null and t.job_id = e.job_id and (t.attempt = e.attempt or t.attempt < e.attempt
                          and not t.once) and t.cancelled limit 1) t on true
  left join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true
  cross join lateral (select case when e.unique_key is null then e.args else coalesce((
                        select a.args from tallybook.amendment a where a.job_id = e.job_id), e.args) end as args) g
  left join tallybook.worker w on w.id = c.worker_id
 where (o.state is null or o.state in ('completed', 'cancelled'))
   and (o.state is distinct from 'cancelled' and t.cancelled is not true
        -- Scalar, with a limit: "not exists" is hashed, with all rows of both tables, where the planner takes them for
        -- small.
        or coalesce((select false from tallybook.entry n where n.job_id = e.job_id and n.attempt > e.attempt limit 1),
                    true)
           and coalesce((select false from tallybook.scheduled n where n.job_id = e.job_id limit 1), true)
           and coalesce((select false from tallybook.waiting n where n.job_id = e.job_id limit 1), true));
comment on view tallybook.job is 'Every job of every state. A look-up by id is an index look-up.';
