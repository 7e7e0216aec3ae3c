-- fires: the result of each tick of each schedule.
--> The result of each tick of each schedule.
-- rights: operator; reader (schedule, tick, fired_at, what, job_id, jobs, ticks)
create or replace view tallybook.fires as select * from tallybook.fire;
