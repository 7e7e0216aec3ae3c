-- breaker_set(name, failures, per, open_for): a circuit breaker: after so many failures within per the jobs of a key
-- wait.
--
-- Open for open_for; then one job is let through as a probe. It completes: the others go on. It fails: open once more.
-- What runs when it opens is not touched, and a job that waits counts no failure. Names as in rate_limit_set; a key may
-- have all three kinds of rules.
--   in_code  the app whose code declares it; a person's rule of that name stays as it is then
-- Failures are those of jobs that name the key, of its queue or its task: attempts that failed or died; not snoozes,
-- cancels, lost workers.
-- Returns created, changed or unchanged. Errors: TB005. Writes limit_rule.
-- rights: operator
create or replace function tallybook.breaker_set(name text, failures int, per interval, open_for interval,
  in_code text default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
begin
  perform tallybook._check_range('failures', failures::text, failures between 1 and 1000, 'It goes from 1 to 1000.');
  perform tallybook._check_range('per', per::text, per between interval '1 s' and interval '366 days',
                                 'It goes from 1 s to 366 days.');
  perform tallybook._check_range('open_for', open_for::text,
                                 open_for between interval '1 s' and interval '366 days',
                                 'It goes from 1 s to 366 days.');
  return tallybook._limit_set('breaker', name, failures, per, null, open_for, in_code, at);
end $$;
