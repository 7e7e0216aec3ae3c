-- fair: the fair keys whose jobs wait for their turn. It reads all of these jobs.
--> Per queue, priority and fair key: the number of jobs that wait for their turn, and the age of the oldest.
-- rights: operator, reader
create or replace view tallybook.fair as
select l.queue, l.priority::int, w.fair_key::text, count(*) as waiting, min(w.enqueued_at) as oldest
  from tallybook.waiting w
  join tallybook.lane l on l.lane_id = w.lane_id
 where w.fair_key is not null
 group by l.queue, l.priority, w.fair_key;
