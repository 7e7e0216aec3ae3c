-- queue_status: the counters for people, per queue, task and state. They cost the same at any size: see counts.
--
--   oldest, newest     when the oldest and the newest job in this state was enqueued; of what has ended when the last
--                      one did. Looked for
--                      among the 1,000 first and last of all jobs in scheduled, waiting and dead, and of each line:
--                      null where none of these
--                      is of the task
--   average_attempts   how often a job in this state has been put in line; one that has not started counts without the
--                      attempt it waits for
-- rights: operator, reader, metrics
create or replace view tallybook.queue_status as
select s.queue, s.task, s.state, s.jobs, s.oldest, s.newest, s.average_attempts from tallybook._status_of(null) s;
comment on view tallybook.queue_status is
  'Per queue, task and state: how many jobs, the oldest, the newest, how many attempts on average.';
