-- queue_status: the counters of each queue, task and state. Their cost does not depend on the number of jobs.
--
--   oldest, newest     when the oldest and the newest job in this state was enqueued; for ended jobs, when the last one
--                      ended. Searched among the first and last 1,000 of scheduled, waiting and dead, and of each lane;
--                      null if none of these is of the task
--   average_attempts   the average number of attempts of these jobs, without attempts that have not started
--> Per queue, task and state: number of jobs, the oldest, the newest, attempts on average.
-- rights: operator, reader, metrics
create or replace view tallybook.queue_status as
select s.queue, s.task, s.state, s.jobs, s.oldest, s.newest, s.average_attempts from tallybook._status_of(null) s;
