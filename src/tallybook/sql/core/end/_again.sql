-- _again(entry, run_at, at, failures, crashes, errors): like _back, for one that has run: a job with a fair key waits for its turn once more.
--
-- Straight to the line, which holds 200 at most, a few hundred that snooze or are retried at once would keep all other keys out.
create or replace function tallybook._again(e tallybook.entry, p_run_at timestamptz, p_at timestamptz, p_failures int, p_crashes int,
  p_errors jsonb) returns void
language plpgsql as $$
begin
  if e.options ? 'fair_key' and not e.options ? 'turn' and p_run_at <= p_at then
    insert into tallybook.waiting (job_id, waits_since, enqueued_at, run_at, lane_id, attempt, failures, crashes, max_attempts, task, args,
                                   headers, unique_key, errors, expires_at, options, fair_key, fair_seq)
    values (e.job_id, p_at, e.enqueued_at, p_at, tallybook._lane_beside(e.lane_id, 'fair'), e.attempt + 1, p_failures, p_crashes, e.max_attempts,
            e.task, e.args, e.headers, e.unique_key, p_errors, e.expires_at, e.options, e.options ->> 'fair_key', nextval('tallybook.job_id'));
    perform tallybook._wake(' fair_release');
  else
    perform tallybook._back(e, p_run_at, p_at, p_failures, p_crashes, p_errors);
  end if;
end $$;
