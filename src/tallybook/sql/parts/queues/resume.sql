-- resume(queue, who): let a paused queue run again, and wake who sleeps on it. False: it was not paused.
-- rights: operator
create or replace function tallybook.resume(queue text, who text default session_user) returns boolean
language plpgsql as $$
begin
  perform tallybook._known_queue(resume.queue);
  update tallybook.queue q set paused_at = null, paused_by = null where q.name = resume.queue
    and q.paused_at is not null;
  if found then
    perform tallybook._wake(resume.queue);
    perform tallybook._queue_said(resume.queue, 'resumed', resume.who);
    return true;
  end if;
  return false;
end $$;

-- _known_queue(queue): makes the settings row of a queue that producers have used; TB002 for one that nobody has.
create or replace function tallybook._known_queue(p_queue text) returns void
language plpgsql as $$
begin
  if exists (select from tallybook.queue q where q.name = p_queue) then return; end if;
  if not exists (select from tallybook.queues k where k.name = p_queue) then
    raise exception 'there is no queue %', to_json(p_queue)
      using errcode = 'TB002', hint = 'A queue is born at its first enqueue, or when a worker serves it.';
  end if;
  insert into tallybook.queue (name) values (p_queue) on conflict do nothing;
end $$;
