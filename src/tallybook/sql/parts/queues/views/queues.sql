-- queues: every queue that has settings or has seen a job.
create or replace view tallybook.queues as
select n.name, q.retention, q.paused_at, q.paused_by, q.created_at, q.max_attempts, q.notify, q.changed_at, q.changed_by
  from (select q.name from tallybook.queue q
        union
        -- The lanes of a dropped queue stay; it is there again once somebody has enqueued into one.
        select l.queue from tallybook.lane l
         where l.dropped is null
            or exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention and e.xid >= pg_snapshot_xmin(l.dropped)
                          and not pg_visible_in_snapshot(e.xid, l.dropped))
            or exists (select from tallybook.scheduled s where s.lane_id = l.lane_id)
            or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is null)
            or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is not null)) n
  left join tallybook.queue q on q.name = n.name;
comment on view tallybook.queues is 'Every queue that has settings or has seen a job.';
-- workers, tasks, schedules, fires, services: the tables of people, to be granted in place of them (see tallybook._rights).
create or replace view tallybook.workers as
select w.id, w.name, w.queues, w.tasks, w.lease, w.started_at, w.seen_at, w.gone_at, w.ended_at,
       w.slots, w.version, w.lag, w.memory from tallybook.worker w;
comment on view tallybook.workers is 'Every worker on record; ended_at is null for those that live.';
create or replace view tallybook.tasks as select * from tallybook.task;
comment on view tallybook.tasks is 'The catalogue: what each task is, as the workers that know it have said.';
create or replace view tallybook.schedules as select * from tallybook.schedule;
comment on view tallybook.schedules is 'Every schedule, declared in code or kept in the database.';
create or replace view tallybook.fires as select * from tallybook.fire;
comment on view tallybook.fires is 'What became of each tick of each schedule.';
create or replace view tallybook.services as select * from tallybook.service;
comment on view tallybook.services is 'Maintenance that any worker runs.';
