-- _queue_used: the queues that have seen a job since they were dropped last; a queue as often as it has lanes.
create or replace view tallybook._queue_used as
select l.queue from tallybook.lane l
 -- The lanes of a dropped queue stay; it is there again once somebody has enqueued into one.
 where l.dropped is null
    or exists (select from tallybook.entry e where e.lane_id = l.lane_id and e.retention = l.retention
               and e.xid >= pg_snapshot_xmin(l.dropped)
                  and not pg_visible_in_snapshot(e.xid, l.dropped))
    or exists (select from tallybook.scheduled s where s.lane_id = l.lane_id)
    or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is null)
    or exists (select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is not null);
