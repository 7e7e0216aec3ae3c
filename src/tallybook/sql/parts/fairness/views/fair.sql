-- fair: the keys whose jobs wait for their turn among the keys of their queue. It reads all of these jobs.
-- rights: operator, reader
create or replace view tallybook.fair as
select l.queue, l.priority::int, w.fair_key::text, count(*) as waiting, min(w.enqueued_at) as oldest
  from tallybook.waiting w
  join tallybook.lane l on l.lane_id = w.lane_id
 where w.fair_key is not null
 group by l.queue, l.priority, w.fair_key;
comment on view tallybook.fair is
  'Per queue, priority and fair key: how many jobs wait for their turn, and since when the oldest is there.';
