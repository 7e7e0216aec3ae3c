-- concurrency_limit_set(name, most): limit the number of jobs that run at the same time, over all workers. Names as in
-- rate_limit_set.
--
--   in_code  the app whose code declares the rule; a rule of this name that a user has set takes precedence and is not
--            changed
--   skips    true: a job that finds all permits taken is cancelled instead of waiting; null: unchanged, or false for a
--            new rule
-- Returns created, changed or unchanged. A lower limit stops no running job. Errors: TB005. Writes limit_rule.
-- rights: operator
create or replace function tallybook.concurrency_limit_set(name text, most int, in_code text default null,
  at timestamptz default clock_timestamp(), skips boolean default null)
returns text language sql as $$
  select tallybook._limit_set('concurrency', name, most, null, null, null, in_code, at, skips)
$$;
