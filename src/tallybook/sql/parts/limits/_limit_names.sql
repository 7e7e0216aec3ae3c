-- _limit_names(): the names of all limits and circuit breakers, of code and of the database.
--
-- Reads rate_limit, concurrency_limit, breaker_rule.
-- rights: worker
create or replace function tallybook._limit_names() returns text[]
language sql stable
as $$
  select array(select r.name from tallybook.rate_limit r union select r.name from tallybook.concurrency_limit r
               union select r.name from tallybook.breaker_rule r order by 1)
$$;
