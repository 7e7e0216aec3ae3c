-- fail(lease, job_id, attempt, error, ...): end an attempt as failed: the job is retried after the backoff, or is dead
-- if it has no attempts left.
--
--   error         what went wrong, as one JSON object: message, and whatever else is known (type, traceback); stored
--                 with attempt, worker, started_at and at, the attempt's end
--   retry_in      delay before the next attempt; null: backoff(failures)
--   max_attempts  the task's own limit, for a job that was enqueued without one; null: its queue's, or 5
--   final         true: no further attempt, even if some are left
--   at            the time; for tests
-- Returns scheduled (available, without a delay), dead, or refused (the lease no longer holds the attempt; nothing has
-- happened). Errors: TB005 an error that is not an object, an infinite retry_in.
-- Reads claim, entry, queue; writes outcome, tally, and scheduled, entry, waiting (with a fair key) or dead.
-- profile: lookup
-- rights: worker
create or replace function tallybook.fail(lease uuid, job_id bigint, attempt int, error jsonb,
  retry_in interval default null, max_attempts int default null, final boolean default false,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  e tallybook.entry; v_held record; v_error jsonb; v_failures int; v_limit int; v_dead boolean;
begin
  perform tallybook._refuse(jsonb_typeof(error) <> 'object',
                            'an error is one JSON object, not ' || jsonb_typeof(error)),
          tallybook._refuse(not isfinite(retry_in), 'retry_in is ' || retry_in,
                            'Give an interval that ends. Set final for a job that has no further attempt.');
  if fail.attempt > 1 then  -- by the index of these
    select x.failures, x.max_attempts, x.lane_id into v_held from tallybook._attempt(fail.job_id, fail.attempt) x;
  else
    select x.failures, x.max_attempts, x.lane_id into v_held from tallybook.entry x
     where x.job_id = fail.job_id and x.attempt = fail.attempt limit 1;
  end if;
  v_failures := v_held.failures + 1;
  v_limit := coalesce(v_held.max_attempts, fail.max_attempts);
  if v_limit is null then
    select q.max_attempts into v_limit from tallybook.lane l join tallybook.queue q on q.name = l.queue
           where l.lane_id = v_held.lane_id;
  end if;
  v_dead := final or v_failures >= least(coalesce(v_limit, 5), 32767);  -- of a smallint
  select jsonb_build_object('attempt', fail.attempt, 'started_at', k.claimed_at, 'at', fail.at, 'worker', k.worker)
         || coalesce(error, '{"message": "failed"}')
    into v_error from tallybook._claimed(lease) k;
  e := tallybook._end(lease, fail.job_id, fail.attempt, case when v_dead then 'dead'
                      else 'failed' end::tallybook.ending, v_error, fail.at);
  if e.job_id is null then return 'refused'; end if;
  e.failures := v_failures;
  e.errors := tallybook._errors(e.errors, v_error);
  if v_dead then
    perform tallybook._make_dead(e, 'failed', fail.at);
    return 'dead';
  end if;
  perform tallybook._next_attempt(e, fail.at + coalesce(retry_in, tallybook.backoff(v_failures)), fail.at, true);
  return case when retry_in <= interval '0' then 'available' else 'scheduled' end;
end $$;
