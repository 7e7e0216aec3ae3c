-- concurrency_limit_set(name, most): at most so many jobs run at once, over all workers. Names as in rate_limit_set.
--
--   in_code  the app whose code declares it; a person's rule of that name stays as it is then
--   skips    true: a job that finds the permits taken does not wait, it is cancelled; null: as the rule is, at first
--            false
-- Returns created, changed or unchanged. A lower one stops nobody who runs. Errors: TB005. Writes limit_rule.
-- rights: operator
create or replace function tallybook.concurrency_limit_set(name text, most int, in_code text default null,
  at timestamptz default clock_timestamp(), skips boolean default null)
returns text language plpgsql as $$
begin
  perform tallybook._check_range('most', most::text, most between 1 and 10000, 'It goes from 1 to 10000.');
  return tallybook._limit_set('concurrency', name, most, null, null, null, in_code, at, skips);
end $$;
