-- subject_upsert(queue, task, subject, args, ...): create a subject, or change the existing one. Returns a report:
--
--   created    there was none
--   updated    a planned or pending one has the new args, time, priority; a completed one is revived with its
--              iterations
--   unchanged  it was as requested
--   active     it runs: it and its next iteration are unchanged
--   dead       it is dead or was killed: a user must decide (retry, subject_forget)
-- A planned one is changed in place, and its failures stay. A pending one keeps its queue, headers, max_attempts and
-- options, except for the version of its args, and its priority is only raised; a future time makes it planned again.
-- One whose new time has come runs with the next run of promote.
--   run_at    null: at once for a new or revived one; others keep their time
--   priority, max_attempts, headers   null: unchanged; 2 for a new one's priority. If only the trace in the headers
--             differs (traceparent, tracestate, baggage), the report is unchanged, and the new trace is not stored
--   options   null: unchanged, except that the version of the args becomes 1
-- old_run_at and new_run_at: the previous and the current time; null for active and dead ones.
-- Waits for another producer that changes the same subject. Errors: TB005 invalid value; TB003 a pending one at another
-- isolation level than READ COMMITTED. Reads and writes: see _subjects_put.
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
