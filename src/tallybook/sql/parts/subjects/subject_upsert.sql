-- subject_upsert(queue, task, subject, args, ...): make a subject, or change the one of that name. Reports what it did:
--
--   created    there was none
--   updated    a planned or pending one has the new args, time, priority; a completed one lives again, with its
--              iterations
--   unchanged  it was as the caller wants it
--   active     it runs: it is never touched, and neither is what it becomes
--   dead       it is dead or was killed: it is left to people (retry, subject_forget)
-- A planned one is changed in place, and its failures stay. What stands in line keeps its queue, and its priority is
-- only raised; a time to come takes it out of the line. What is due by its new time runs with the next look of promote.
--   run_at    null: at once for a new or revived one; the others keep their time
--   priority, max_attempts, headers   null: as they are, 2 for a new one's priority
--   options   null: as they are, but for the version of the args, which is the first then
-- old_run_at and new_run_at: when it was to run and when it runs now; null for active and dead ones.
-- Waits for another producer that changes the same subject. Errors: TB005 what does not fit; TB003 a pending one is to
-- be changed at another isolation level than READ COMMITTED. Reads and writes: see _subjects_put.
-- rights: producer
create or replace function tallybook.subject_upsert(queue text, task text, subject text, args jsonb default '{}',
  run_at timestamptz default null, priority int default null, max_attempts int default null, headers jsonb default null,
  options jsonb default null, at timestamptz default clock_timestamp(),
  out job_id bigint, out report text, out old_run_at timestamptz, out new_run_at timestamptz)
language sql as $$
  select p.job_id, p.report, p.old_run_at, p.new_run_at
    from tallybook._subjects_put(true, queue, task, array[subject], array[args::text], array[run_at], array[priority],
                                 max_attempts, array[headers::text], array[options::text], at) p
$$;
