-- enqueue(queue, task, args, ...): enqueue a job in the caller's transaction. Returns its id.
--
-- Workers see it when that transaction commits, and never if it rolls back. Waits only for a producer that is using the
-- same unique key at the same moment.
--   run_at        start no earlier than this; null or past: at once
--   priority      lower runs first
--   unique_key    at most one live job of this task has it
--   on_conflict   what happens if another job has the key: skip (default), raise, or change that job while it is
--                 queued:
--                 replace_args, raise_priority (to this call's, if that runs earlier), push_run_at (to this call's).
--                 All but raise return the other job's id.
--   unique_while  running (default): the job holds its unique key until it has ended; queued: only until it starts
--   order_key     jobs with the same key run one at a time, in the order in which they became available
--   expires_at    no attempt starts after it: the job is then dead, with the reason expired
--   max_attempts  how many failures make it a dead letter; null: the limit of its task or its queue, or 5
--   headers       data in addition to the args: a trace, tags; links: rows of yours to which the job belongs,
--                 {"links": {"submission": 42}}
--   options       rarely used settings of this job, one JSON object: retry, version, limits, fair_key
--   at            the time; for tests
-- Errors: TB005 an invalid value, TB008 the key is taken and on_conflict is raise; TB003 on_conflict changes an
-- available job at an isolation level other than READ COMMITTED.
-- Reads lane; writes entry, scheduled or (with a fair key) waiting, unique_key, order_line, at first use lane; on a
-- conflict scheduled, waiting, amendment.
-- rights: producer
create or replace function tallybook.enqueue(queue text, task text, args jsonb default '{}',
  run_at timestamptz default null, priority int default 2, unique_key text default null, max_attempts int default null,
  headers jsonb default null, on_conflict text default 'skip', unique_while text default 'running',
  order_key text default null, expires_at timestamptz default null, options jsonb default null,
  at timestamptz default clock_timestamp())
returns bigint language plpgsql as $$
declare
  v_id bigint := nextval('tallybook.job_id');
  v_holder bigint; v_done boolean;
begin
  -- Assigned, not performed: PERFORM takes 0.7 us more, which is much for a call that every job makes.
  v_done := tallybook._check_name('task name', task, 200) is null;
  v_done := tallybook._check_args(args, headers) is null;
  if max_attempts not between 1 and 32767 then
    raise exception 'max_attempts % is out of range', max_attempts using errcode = 'TB005',
      hint = 'It must be from 1 to 32767.';
  end if;
  if order_key is not null or expires_at is not null or options is not null or not isfinite(run_at) then
    perform tallybook._check_options(order_key, expires_at, options, run_at);
  end if;
  if unique_key is not null then
    v_holder := tallybook._claim_key(task, unique_key, v_id, unique_while, on_conflict, args, priority, run_at,
                                       options -> 'version', at);
    if v_holder <> v_id then return v_holder; end if;
  end if;
  v_done := tallybook._put(v_id, queue, task, args, run_at, priority, unique_key, max_attempts, headers, at,
                           order_key, expires_at, options) is null;
  return v_id;
end $$;
