-- subject_push(queue, task, subject, ...): create a subject, a recurring job with a name, unless it exists.
--
-- A second push of the same (task, subject) is a no-op, also while it runs, and after it has completed, died or been
-- killed. A subject that was dropped, forgotten or cancelled is created again. Runs in the caller's transaction, like
-- enqueue.
--   subject       the name, 1 to 512 bytes; unique per task
--   run_at        start no earlier than this; null or past: pending at once
--   max_attempts  the number of failures that makes it dead; null: that of the task or the queue, or 5
--   priority, args, headers, options   as in enqueue
-- Returns the job's id, and whether it was created. Waits only for another producer that creates the same subject at
-- the same moment. Errors: TB005 invalid value. Reads and writes: see _subjects_put.
-- rights: producer
create or replace function tallybook.subject_push(queue text, task text, subject text, args jsonb default '{}',
  run_at timestamptz default null, priority int default 2, max_attempts int default null, headers jsonb default null,
  options jsonb default null, at timestamptz default clock_timestamp(), out job_id bigint, out created boolean)
language sql as $$
  select p.job_id, p.report = 'created'
    from tallybook._subjects_put(false, queue, task, array[subject], array[args::text], array[run_at], array[priority],
                                 max_attempts, array[headers::text], array[options::text], at) p
$$;
