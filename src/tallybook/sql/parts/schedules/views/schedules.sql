-- schedules: all schedules, declared in code or stored in the database.
--> All schedules, declared in code or stored in the database.
-- rights: operator; reader (name, source, app, task, queue, priority, cron, every, tz, missed, overlap, paused_at,
--   paused_by, tick, due_at, fired_count, skipped_count, missed_count, failed_count)
create or replace view tallybook.schedules as select * from tallybook.schedule;
