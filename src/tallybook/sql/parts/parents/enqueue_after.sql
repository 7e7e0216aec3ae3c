-- enqueue_after(queue, task, after, args, ...): enqueue a job that waits for other jobs, its parents. Returns its id.
--
-- It waits (state waiting) until all of them have ended for good. Then it is available, or scheduled if its run_at has
-- not come.
--   after       the ids of its parents; empty: an ordinary job
--   on_parent   completed (default): if a parent is cancelled or dead, the job is cancelled with that reason;
--               any: it runs in any case
--   failed_as   the name of an arg that receives a list of the parents that did not complete, or []: one object each
--               with job, task, state (dead, cancelled, gone), reason and message; the first 1,000
-- All others are those of enqueue. If another live job has the unique key, its id is returned, and it waits for what it
-- waited for.
-- Errors: those of enqueue; TB002 an unknown or uncommitted parent; TB005 also: that other job would wait for itself.
-- Reads lane, entry, scheduled, waiting, dead; writes waiting, parent, unique_key, at first use lane.
-- rights: producer
create or replace function tallybook.enqueue_after(queue text, task text, after bigint[], args jsonb default '{}',
  on_parent text default 'completed', failed_as text default null, run_at timestamptz default null,
  priority int default 2, unique_key text default null, max_attempts int default null, headers jsonb default null,
  on_conflict text default 'skip', unique_while text default 'running', order_key text default null,
  expires_at timestamptz default null, options jsonb default null, at timestamptz default clock_timestamp())
returns bigint language plpgsql as $$
declare
  v_ids bigint[];
begin
  perform tallybook._refuse(after is null, 'after is null', 'Pass the ids of the parents.');
  if after = '{}' then
    return tallybook.enqueue(queue, task, args, run_at, priority, unique_key, max_attempts, headers, on_conflict,
                             unique_while, order_key, expires_at, options, at);
  end if;
  select f.job_ids into v_ids
    from tallybook.fan_out(queues => array[queue], tasks => array[task], args => array[args::text],
                           run_ats => array[run_at],
           priorities => array[priority], unique_keys => array[unique_key], max_attempts => array[max_attempts],
           headers => array[headers::text], on_conflicts => array[on_conflict], unique_whiles => array[unique_while],
           order_keys => array[order_key], expires_ats => array[expires_at], options => array[options::text],
           afters => array[after::text], on_parents => array[on_parent], failed_as => array[failed_as], at => at) f;
  return v_ids[1];
end $$;
