-- breaker_set(name, failures, per, open_for): create or change a circuit breaker: after this many failures within per,
-- the jobs of a key wait.
--
-- It is open for open_for. Then one job starts as a probe: if it completes, the others continue; if it fails, the
-- breaker opens again. Running jobs are not affected, and waiting does not count as a failure. Names as in
-- rate_limit_set; a key can have all three kinds of rules.
--   in_code  the app whose code declares the rule; a rule of this name that a user has set takes precedence and is not
--            changed
-- Failures are failed or dead attempts of jobs that name the key, or of the jobs of its queue or task. Snoozes, cancels
-- and lost workers do not count. Returns created, changed or unchanged. Errors: TB005. Writes limit_rule.
-- rights: operator
create or replace function tallybook.breaker_set(name text, failures int, per interval, open_for interval,
  in_code text default null, at timestamptz default clock_timestamp())
returns text language sql as $$
  select tallybook._limit_set('breaker', name, failures, per, null, open_for, in_code, at)
$$;
