-- _queue_unused(queue): whether there is such a queue. TB005 while workers serve it, or schedules enqueue into it; the
-- error has their numbers.
--
-- For queue_drop, and for callers that truncate the queue before in transactions of their own. Reads worker, schedule.
-- rights: operator
create or replace function tallybook._queue_unused(p_queue text) returns boolean language plpgsql as $$
begin
  if not exists (select from tallybook.queues q where q.name = p_queue) then return false; end if;
  perform tallybook._refuse(w.n + s.n > 0,
            format('queue %s is in use: %s workers serve it, %s schedules enqueue into it', to_json(p_queue), w.n, s.n),
            'Stop these workers and drop these schedules first.')
     from (select count(*) as n from tallybook.worker k where k.ended_at is null and p_queue = any (k.queues)) w,
          (select count(*) as n from tallybook.schedule k where k.queue = p_queue) s;
  return true;
end $$;
