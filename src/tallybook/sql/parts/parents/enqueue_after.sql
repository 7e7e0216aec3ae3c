-- enqueue_after(queue, task, after, args, ...): enqueue a job that waits for other jobs, its parents. Returns its id.
--
-- It waits (state waiting) until all of them have ended for good. Then it is available, or scheduled if its run_at has
-- not come.
--   after       the ids of its parents; empty: an ordinary job
--   on_parent   completed (default): if a parent is cancelled or dead, the job is cancelled with that reason;
--               any: it runs however they ended
--   failed_as   the name of an arg that receives a list of the parents that did not complete, or []: one object each
--               with job, task, state (dead, cancelled, gone), reason and message; the first 1,000
-- The other arguments are those of enqueue. If a live job already has the unique key, its id is returned, and its
-- parents do not change.
-- Errors: those of enqueue; TB002 an unknown or uncommitted parent; TB005 also if the job that has the unique key would
-- wait for itself. Reads lane, entry, scheduled, waiting, dead; writes waiting, parent, unique_key, at first use lane.
-- rights: producer
create or replace function tallybook.enqueue_after(queue text, task text, after bigint[], args jsonb default '{}',
  on_parent text default 'completed', failed_as text default null, run_at timestamptz default null,
  priority int default 2, unique_key text default null, max_attempts int default null, headers jsonb default null,
  on_conflict text default 'skip', unique_while text default 'running', order_key text default null,
  expires_at timestamptz default null, options jsonb default null, at timestamptz default clock_timestamp())
returns bigint language plpgsql as $$
begin
  perform tallybook._refuse(after is null, 'after is null', 'Pass the ids of the parents.');
  if after = '{}' then
    return tallybook.enqueue(queue, task, args, run_at, priority, unique_key, max_attempts, headers, on_conflict,
                             unique_while, order_key, expires_at, options, at);
  end if;
  return (select f.job_ids[1]
            from tallybook.fan_out(array[queue], array[task], array[args::text], array[run_at], array[priority],
                   array[unique_key], array[max_attempts], array[headers::text], array[on_conflict],
                   array[unique_while], array[order_key], array[expires_at], array[options::text],
                   array[after::text], array[on_parent], array[failed_as], at) f);
end $$;
