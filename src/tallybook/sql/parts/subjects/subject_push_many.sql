-- subject_push_many(queue, task, subjects, args, ...): push many subjects in one statement. Returns one report each, in
-- the order given.
--
-- Arrays of one length (args, headers and options as JSON text), or null for the default of all.
--   report   created, or unchanged: it exists, or comes earlier in the same batch
--   new_run_at  when a created one runs
-- Concurrent calls with the same subjects cannot deadlock. Errors: TB005 invalid value; then nothing is created.
-- rights: producer
create or replace function tallybook.subject_push_many(queue text, task text, subjects text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, options text[] default null,
  max_attempts int default null, at timestamptz default clock_timestamp(), headers text[] default null)
returns table (subject text, job_id bigint, report text, old_run_at timestamptz, new_run_at timestamptz)
language sql as $$
  select subjects[p.place], p.job_id, p.report, p.old_run_at, p.new_run_at
    from tallybook._subjects_put(false, queue, task, subjects, args, run_ats, priorities, max_attempts, headers,
                                 options, at) p
   order by p.place
$$;
