-- subject_upsert_many(queue, task, subjects, args, ...): upsert many subjects in one statement. Returns one report
-- each, in the order given.
--
-- Arrays of one length (args, headers and options as JSON text), or null for the default of all. If a name occurs twice
-- in a batch, the last one counts; the other is reported as unchanged (or active, or dead). Reports, times and errors:
-- see subject_upsert. Concurrent calls with the same subjects cannot deadlock.
-- rights: producer
create or replace function tallybook.subject_upsert_many(queue text, task text, subjects text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, options text[] default null,
  max_attempts int default null, at timestamptz default clock_timestamp(), headers text[] default null)
returns table (subject text, job_id bigint, report text, old_run_at timestamptz, new_run_at timestamptz)
language sql as $$
  select subjects[p.place], p.job_id, p.report, p.old_run_at, p.new_run_at
    from tallybook._subjects_put(true, queue, task, subjects, args, run_ats, priorities, max_attempts, headers, options,
                                 at) p
   order by p.place
$$;
