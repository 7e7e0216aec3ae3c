-- resume(queue, who): let workers claim jobs of a paused queue again, and wake them. Returns false if it was not
-- paused.
-- Errors: TB002 an unknown queue. Writes queue.
-- rights: operator
create or replace function tallybook.resume(queue text, who text default session_user) returns boolean
language sql as $$ select tallybook._queue_pause(queue, false, who) $$;

-- _queue_pause(queue, paused, who, at): pause or resume a queue; false: nothing changed. Creates the settings row
-- of a queue that producers have used; TB002 for an unknown queue.
create or replace function tallybook._queue_pause(p_queue text, p_paused boolean, p_who text,
  p_at timestamptz default null) returns boolean
language plpgsql as $$
begin
  if not exists (select from tallybook.queue q where q.name = p_queue) then
    perform tallybook._refuse(not exists (select from tallybook.queues k where k.name = p_queue),
              format('there is no queue %s', coalesce(to_json(p_queue)::text, '<NULL>')),
              'A queue is created by its first job, or by a worker that serves it.', 'TB002');
    insert into tallybook.queue (name) values (p_queue) on conflict do nothing;
  end if;
  update tallybook.queue q set paused_at = p_at, paused_by = case when p_paused then p_who end
   where q.name = p_queue and (q.paused_at is null) = p_paused;
  if not found then return false; end if;
  if not p_paused then perform tallybook._wake(p_queue); end if;
  perform tallybook._queue_changed(p_queue, case when p_paused then 'paused' else 'resumed' end, p_who);
  return true;
end $$;
