-- attempt: every attempt in the history: job, worker, times, end, error.
-- rights: operator; reader (job_id, attempt, queue, task, failures, crashes, state, started_at, ended_at, worker_id,
--   worker)
create or replace view tallybook.attempt as
select e.job_id, e.attempt, l.queue, e.task, e.failures::int, e.crashes::int,
       coalesce(o.state::text, case when c.worker_id is not null then 'running' else 'available' end) as state,
       c.claimed_at as started_at, o.ended_at, c.worker_id, w.name as worker, o.error
  from tallybook.entry e
  join tallybook.lane l on l.lane_id = e.lane_id
  left join lateral (  -- one at a time: a join reads all outcomes while the planner has no statistics
    select o.state, o.error, o.ended_at from tallybook.outcome o
     where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true
  left join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true
  left join tallybook.worker w on w.id = c.worker_id;
