-- subject_push(queue, task, subject, ...): make a subject, a named job that lives on, unless there is one of that name already.
--
-- A second push of the same (task, subject) is a no-op, also while it runs, and when it has completed, died or was killed; one that was
-- dropped, forgotten or cancelled is made anew. In the caller's transaction, like enqueue.
--   subject       the name, 1 to 512 bytes; a name of its own for each task
--   run_at        not before; null or past: pending at once
--   max_attempts  how many failures make it dead; null: what the task says, or 5
--   priority, args, headers, options   as in enqueue
-- Returns the job's id, and whether it was made. Waits only for another producer that makes the same subject at the same moment.
-- Errors: TB005 what does not fit. Reads and writes: see _subjects_put.
create or replace function tallybook.subject_push(queue text, task text, subject text, args jsonb default '{}',
  run_at timestamptz default null, priority int default 2, max_attempts int default null, headers jsonb default null,
  options jsonb default null, at timestamptz default clock_timestamp(), out job_id bigint, out created boolean)
language sql as $$
  select p.job_id, p.report = 'created'
    from tallybook._subjects_put(false, queue, task, array[subject], array[args::text], array[run_at], array[priority], max_attempts,
                                 array[headers::text], array[options::text], at) p
$$;

-- subject_append(queue, task, args, ...): make a subject with a name of its own (a random UUID), pending at once, behind the others.
create or replace function tallybook.subject_append(queue text, task text, args jsonb default '{}', priority int default 2,
  max_attempts int default null, headers jsonb default null, options jsonb default null, at timestamptz default clock_timestamp(),
  out job_id bigint, out subject text)
language sql as $$
  select p.job_id, n.subject from (select gen_random_uuid()::text as subject) n,
         lateral tallybook.subject_push(queue, task, n.subject, args, null, priority, max_attempts, headers, options, at) p
$$;

-- subject_push_many(queue, task, subjects, args, ...): push many by one statement. One report each, in the order given.
--
-- Arrays of one length (args, headers and options as JSON text), or null where all have the default.
--   report   created, or unchanged: there was one of that name, or it stands in the same batch before this one
--   new_run_at  of those that were made: when they run
-- Any number of calls with the same subjects cannot deadlock. Errors: TB005 what does not fit; nothing is put in then.
create or replace function tallybook.subject_push_many(queue text, task text, subjects text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, options text[] default null, max_attempts int default null,
  at timestamptz default clock_timestamp(), headers text[] default null)
returns table (subject text, job_id bigint, report text, old_run_at timestamptz, new_run_at timestamptz)
language sql as $$
  select subjects[p.place], p.job_id, p.report, p.old_run_at, p.new_run_at
    from tallybook._subjects_put(false, queue, task, subjects, args, run_ats, priorities, max_attempts, headers, options, at) p
   order by p.place
$$;
