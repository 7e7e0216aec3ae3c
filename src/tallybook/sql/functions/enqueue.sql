-- enqueue(queue, task, args, ...): put one job in, in the caller's transaction. Returns its id.
--
-- Visible to workers when that transaction commits, never if it rolls back. Waits for nobody, except for a producer that
-- is using the same unique key at the same moment.
--   run_at        not before; null or past: at once
--   priority      lower runs first
--   unique_key    at most one live job of this task has it: a second one is not put in, and the id of the first returned
--   max_attempts  how many failures make it a dead letter; null: what the task says, or 5
--   headers       technical companions: trace, tags
-- Errors: TB005 what does not fit. Reads lane; writes entry or scheduled, unique_key, at first use lane.
create or replace function tallybook.enqueue(queue text, task text, args jsonb default '{}', run_at timestamptz default null,
  priority int default 2, unique_key text default null, max_attempts int default null, headers jsonb default null)
returns bigint language plpgsql as $$
declare
  v_id bigint := nextval('tallybook.job_id');
  v_holder bigint;
begin
  perform tallybook._check_name('task name', task, 200);
  perform tallybook._check_args(args, headers);
  if max_attempts not between 1 and 32767 then
    raise exception 'max_attempts % is out of range', max_attempts using errcode = 'TB005', hint = 'It goes from 1 to 32767.';
  end if;
  if unique_key is not null then
    v_holder := tallybook._claim_key(task, unique_key, v_id);
    if v_holder <> v_id then return v_holder; end if;
  end if;
  perform tallybook._put(v_id, queue, task, args, run_at, priority, unique_key, max_attempts, headers, clock_timestamp());
  return v_id;
end $$;
