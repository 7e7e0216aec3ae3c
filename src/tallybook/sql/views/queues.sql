-- queues: every queue that has settings or has seen a job.
create or replace view tallybook.queues as
select n.name, q.retention, q.paused_at, q.paused_by, q.created_at
  from (select q.name from tallybook.queue q union select l.queue from tallybook.lane l) n
  left join tallybook.queue q on q.name = n.name;
comment on view tallybook.queues is 'Every queue that has settings or has seen a job.';
-- workers, tasks, schedules, fires, services: the tables of people, to be granted in place of them (see tallybook._rights).
create or replace view tallybook.workers as
select w.id, w.name, w.queues, w.tasks, w.lease, w.started_at, w.seen_at, w.gone_at, w.ended_at from tallybook.worker w;
comment on view tallybook.workers is 'Every worker on record; ended_at is null for those that live.';
create or replace view tallybook.tasks as select * from tallybook.task;
comment on view tallybook.tasks is 'The catalogue: what each task is, as the workers that know it have said.';
create or replace view tallybook.schedules as select * from tallybook.schedule;
comment on view tallybook.schedules is 'Every schedule, declared in code or kept in the database.';
create or replace view tallybook.fires as select * from tallybook.fire;
comment on view tallybook.fires is 'What became of each tick of each schedule.';
create or replace view tallybook.services as select * from tallybook.service;
comment on view tallybook.services is 'Maintenance that any worker runs.';
