-- pause(queue, who): stop claiming jobs of a queue until resume; running jobs continue. Returns false if it was already
-- paused. Each claim checks this, so a pause takes effect when it commits; clients are notified on the channel
-- tallybook_queues. Errors: TB002 an unknown queue. Writes queue.
-- rights: operator
create or replace function tallybook.pause(queue text, who text default session_user,
  at timestamptz default clock_timestamp())
returns boolean language sql as $$ select tallybook._queue_pause(queue, true, who, at) $$;
