-- queue_stats: how many jobs of each queue are in each state, and how many ever ended how. REPLACED by the counters, which keep name and
-- columns; until then it counts, and reads all of the history that is kept.
create or replace view tallybook.queue_stats as
select n.name as queue, j.scheduled, j.retrying, j.waiting, j.available, j.running, j.dead, j.completed,
       (select count(*) from tallybook.error e where e.queue = n.name and e.state <> 'lost') as failed, j.cancelled, j.oldest
  from (select q.name from tallybook.queue q union select l.queue from tallybook.lane l) n
  left join lateral (
    select count(*) filter (where v.state = 'scheduled') as scheduled, count(*) filter (where v.state = 'retrying') as retrying,
           count(*) filter (where v.state = 'waiting') as waiting, count(*) filter (where v.state = 'available') as available,
           count(*) filter (where v.state = 'running') as running, count(*) filter (where v.state = 'dead') as dead,
           count(*) filter (where v.state = 'completed') as completed, count(*) filter (where v.state = 'cancelled') as cancelled,
           min(greatest(v.run_at, v.enqueued_at)) filter (where v.state = 'available') as oldest
      from tallybook.job v where v.queue = n.name) j on true;
comment on view tallybook.queue_stats is 'How many jobs of each queue are in each state, how many ever ended how, and since when the oldest in line is there.';
