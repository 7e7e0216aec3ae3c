-- queues: every queue that has settings or has seen a job.
-- rights: worker, operator, reader
create or replace view tallybook.queues as
select n.name, q.retention, q.paused_at, q.paused_by, q.created_at, q.max_attempts, q.notify, q.changed_at,
       q.changed_by, q.error_retention, q.metrics_retention
  from (select q.name from tallybook.queue q
        union
        -- The lanes of a dropped queue stay; it is there again once somebody has enqueued into one.
        select l.queue from tallybook.lane l
         where l.dropped is null
            or exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention
                       and e.xid >= pg_snapshot_xmin(l.dropped)
                          and not pg_visible_in_snapshot(e.xid, l.dropped))
            or exists (select from tallybook.scheduled s where s.lane_id = l.lane_id)
            or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is null)
            or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is not null)) n
  left join tallybook.queue q on q.name = n.name;
comment on view tallybook.queues is 'Every queue that has settings or has seen a job.';
