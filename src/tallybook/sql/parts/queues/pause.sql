-- pause(queue, who): claim no more jobs of this queue until resume; running jobs continue. Returns false if it was
-- paused already. Claims check it themselves, so it applies from its commit on; clients are notified on the channel
-- tallybook_queues. Errors: TB002 an unknown queue. Writes queue.
-- rights: operator
create or replace function tallybook.pause(queue text, who text default session_user,
  at timestamptz default clock_timestamp())
returns boolean language sql as $$ select tallybook._queue_pause(queue, true, who, at) $$;
