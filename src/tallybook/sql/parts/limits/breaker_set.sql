-- breaker_set(name, failures, per, open_for): create or change a circuit breaker: after this many failures within per,
-- the jobs of a key wait.
--
-- It is open for open_for. Then one job starts as a probe: if it completes, the others continue; if it fails, the
-- breaker opens again. Running jobs are not affected, and waiting counts no failure. Names as in rate_limit_set; a key
-- can have all three kinds of rules.
--   in_code  the app whose code declares it; a person's rule of that name has precedence and stays
-- Failures are attempts that failed or died, of jobs that name the key, or of its queue or task; not snoozes, cancels
-- or lost workers. Returns created, changed or unchanged. Errors: TB005. Writes limit_rule.
-- rights: operator
create or replace function tallybook.breaker_set(name text, failures int, per interval, open_for interval,
  in_code text default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
begin
  perform tallybook._check_range('failures', failures::text, failures between 1 and 1000, 'It must be from 1 to 1000.');
  perform tallybook._check_range('per', per::text, per between interval '1 s' and interval '366 days',
                                 'It must be from 1 s to 366 days.');
  perform tallybook._check_range('open_for', open_for::text,
                                 open_for between interval '1 s' and interval '366 days',
                                 'It must be from 1 s to 366 days.');
  return tallybook._limit_set('breaker', name, failures, per, null, open_for, in_code, at);
end $$;
