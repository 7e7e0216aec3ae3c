-- _aside: the jobs that are not in line, of all three tables: place is the table, and job_state the state if the job is
-- not cancelled. A query of it becomes a query of each table, with its indexes.
create or replace view tallybook._aside as
select 'scheduled' as place, s.job_id, s.lane_id, s.attempt, s.failures, s.crashes, s.max_attempts, s.task, s.args,
       s.headers, s.unique_key, s.errors, s.expires_at, s.order_key, s.options, s.enqueued_at, s.run_at,
       null::timestamptz as since, null::text as reason, null::text as fair_key, null::bigint as fair_seq,
       case when s.failures > 0 then 'retrying' else 'scheduled' end as job_state
  from tallybook.scheduled s
union all
select 'waiting', w.job_id, w.lane_id, w.attempt, w.failures, w.crashes, w.max_attempts, w.task, w.args, w.headers,
       w.unique_key, w.errors, w.expires_at, w.order_key, w.options, w.enqueued_at, w.run_at, w.waits_since,
       null, w.fair_key collate "default", w.fair_seq, 'waiting'
  from tallybook.waiting w
union all
select 'dead', d.job_id, d.lane_id, d.attempt, d.failures, d.crashes, d.max_attempts, d.task, d.args, d.headers,
       d.unique_key, d.errors, d.expires_at, d.order_key, d.options, d.enqueued_at, null, d.died_at, d.reason,
       null, null, 'dead'
  from tallybook.dead d;
