-- subject: every subject, with plain columns, in whatever state its job is. A look-up by task and subject uses indexes
-- only.
--
--> Every subject, a recurring job with a name. A look-up by task and subject is an index look-up.
--   state       planned, pending, active, completed, killed, dead; a subject whose job was cancelled is not shown
--   iterations  how often it was rescheduled, completed or killed; last_at: the last of these
--   attempts, failures   starts and failures since then
--   scope       the queue to which the name belongs; empty: all queues share it
-- rights: operator
create or replace view tallybook.subject as
select j.task, j.subject, j.job_id, coalesce(j.queue, n.queue) as queue, coalesce(j.ended_as, n.state) as state,
       coalesce(j.priority, n.priority) as priority, coalesce(j.args, n.args) as args,
       coalesce(j.iterations, (n.options #>> '{subject,iterations}')::int) as iterations,
       coalesce(j.failures, n.failures) as failures, coalesce(j.attempts, n.attempts) as attempts,
       n.run_at as next_run_at, coalesce(j.last_at, (n.options #>> '{subject,last_at}')::timestamptz) as last_at,
       coalesce(j.error, n.error) ->> 'message' as last_error, coalesce(j.error, n.error) as error, j.made_at,
       j.ended_at, j.scope
  from tallybook.subject_job j
  left join lateral (select x.* from tallybook._subject_now(j.job_id) x where j.ended_as is null) n on true
 where j.ended_as is not null or n.state is not null;
