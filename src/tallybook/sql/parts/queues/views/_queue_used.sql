-- _queue_used: the queues that have had a job since they were last dropped; one row per lane.
create or replace view tallybook._queue_used as
select l.queue from tallybook.lane l
 -- The lanes of a dropped queue stay; an enqueue into one creates it again.
 where l.dropped is null
    or exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention
               and e.xid >= pg_snapshot_xmin(l.dropped)
                  and not pg_visible_in_snapshot(e.xid, l.dropped))
    or exists (select from tallybook.scheduled s where s.lane_id = l.lane_id)
    or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is null)
    or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is not null);
