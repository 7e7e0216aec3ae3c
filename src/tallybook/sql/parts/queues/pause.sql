-- pause(queue, who): no job of this queue is claimed until resume. What runs goes on. False: it was paused already.
-- Claims ask for it themselves, so it holds from its commit on; clients are told on the channel tallybook_queues.
-- Errors: TB005 a name that no queue can have. An unknown queue is refused with TB002: nothing to pause.
-- rights: operator
create or replace function tallybook.pause(queue text, who text default session_user,
  at timestamptz default clock_timestamp())
returns boolean language sql as $$
  select tallybook._queue_pause(pause.queue, true, pause.who, pause.at)
$$;
