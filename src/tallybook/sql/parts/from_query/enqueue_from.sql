-- enqueue_from(query, queue, task, ...): enqueue one job for each row of a query, except rows that already have an open
-- job.
--
-- The row's key is the job's unique key, with on_conflict skip: a row whose key an open job has is skipped, and so is a
-- second row with the same key. Jobs run in the query's order. A second call enqueues only what is new. Returns the
-- number of rows and of new jobs. Above 100,000 rows, or 16 MB of args, rows with keys are enqueued in parts, in the
-- order of their keys, and the query's order applies only within a part. Keys are then always locked in the same order,
-- so calls do not deadlock.
--   query         one SELECT, run with the caller's rights. Its columns, by name, in any order:
--                   args      jsonb        one object by parameter name
--                   key       text         optional: the unique key, also as uuid or whole number; null: none
--                   run_at    timestamptz  optional: not before; null or past: at once
--                   priority  int          optional; null: the one below
--   queue, task, priority, max_attempts, headers, options    for all these jobs, as in enqueue
--   at            the present time, for what is due
-- Waits only for a producer that uses one of the same keys at the same moment. Its memory does not grow with the number
-- of rows.
-- Errors: TB005 an invalid argument, query or row; then nothing is enqueued. Errors of the query are passed on
-- unchanged. Reads and writes what enqueue does (see _enqueue_batch).
-- rights: worker, as the caller
create or replace function tallybook.enqueue_from(query text, queue text, task text, priority int default 2,
  max_attempts int default null, headers jsonb default null, options jsonb default null,
  at timestamptz default clock_timestamp(), out seen bigint, out created bigint)
language plpgsql as $$
declare
  v_read record; r record; v_n int := 0; v_bytes bigint := 0;
  v_places int[]; v_keys text[]; v_args jsonb[]; v_run_ats timestamptz[]; v_priorities int[];
begin
  seen := 0; created := 0;
  perform tallybook._check_batch(queue, task, max_attempts, headers, options);
  select * into v_read from tallybook._query_read(query);
  -- Numbered in the query's order, since that is the order of the jobs; then by key, in which the keys are taken.
  for r in execute format('select s.*, lead(true) over (order by s.key, s.place) is null as last '
                          'from (select row_number() over () as place, %s from (%s%s) q) s order by s.key, s.place',
                          v_read.columns, v_read.query, E'\n') loop
    v_n := v_n + 1; v_bytes := v_bytes + pg_column_size(r.args);
    v_places[v_n] := r.place; v_keys[v_n] := r.key; v_args[v_n] := r.args; v_run_ats[v_n] := r.run_at;
    v_priorities[v_n] := coalesce(r.priority, priority);
    if v_n = 100000 or v_bytes > 16000000 or r.last then
      created := created + tallybook._enqueue_batch(queue, task, v_places, v_keys, v_args, v_run_ats, v_priorities,
                                                    max_attempts, headers, options, at);
      seen := seen + v_n; v_n := 0; v_bytes := 0;
      v_places := null; v_keys := null; v_args := null; v_run_ats := null; v_priorities := null;
    end if;
  end loop;
end $$;

-- _check_batch(queue, task, max_attempts, headers, options): raises TB005 for what no job of a query may carry.
-- rights: worker, as the caller
create or replace function tallybook._check_batch(p_queue text, p_task text, p_max_attempts int, p_headers jsonb,
  p_options jsonb) returns void
language plpgsql immutable as $$
begin
  perform tallybook._check_name('queue', p_queue, 64), tallybook._check_name('task name', p_task, 200),
          tallybook._check_args('{}', p_headers), tallybook._check_options(null, null, p_options);
  perform tallybook._refuse(p_max_attempts not between 1 and 32767,
                            format('max_attempts %s is out of range', p_max_attempts), 'It must be from 1 to 32767.');
end $$;
