-- _back(entry, run_at, at, failures, crashes, errors, part): put a job back in line, or in scheduled, as its next attempt.
--
-- A job that goes back at once gets a fresh number, behind what is in its lane now, and wakes who sleeps.
create or replace function tallybook._back(e tallybook.entry, p_run_at timestamptz, p_at timestamptz, p_failures int, p_crashes int,
  p_errors jsonb) returns void
language plpgsql as $$
declare
  v_queue text;
begin
  if p_run_at > p_at then
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, task, args,
                                     headers, unique_key, errors, expires_at, order_key, options)
    values (e.job_id, p_run_at, e.enqueued_at, e.lane_id, e.attempt + 1, p_failures, p_crashes, e.max_attempts, e.task, e.args,
            e.headers, e.unique_key, p_errors, e.expires_at, e.order_key, e.options);
    if p_run_at < p_at + interval '10 s' then perform tallybook._wake(' promote'); end if;
  else
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts, task, args,
                                 headers, unique_key, run_at, errors, expires_at, order_key, options)
    values (nextval('tallybook.job_id'), e.job_id, e.enqueued_at, e.lane_id, e.attempt + 1, e.retention, p_failures, p_crashes,
            e.max_attempts, e.task, e.args, e.headers, e.unique_key, p_at, p_errors,
            e.expires_at, e.order_key, e.options);
    select l.queue into v_queue from tallybook.lane l where l.lane_id = e.lane_id;
    perform tallybook._wake(v_queue);
  end if;
end $$;
