-- _limits_register(app, rules): the limits that an app's code declares, as a worker says at its start.
--
-- Changed where they differ, gone with their last declaration. A person's rule of the same name stays as it is.
-- Writes rate_limit, concurrency_limit, breaker_rule.
-- rights: worker
create or replace function tallybook._limits_register(p_app text, p_rules jsonb) returns void
language plpgsql as $$
begin
  delete from tallybook.rate_limit r
   where r.in_code = p_app and not exists (select from jsonb_array_elements(p_rules -> 'rates') x
                                           where x ->> 'name' = r.name);
  perform tallybook.rate_limit_set(x ->> 'name', (x ->> 'calls')::int, (x ->> 'per')::interval, (x ->> 'burst')::int,
                                   p_app)
     from (select x from jsonb_array_elements(p_rules -> 'rates') x order by x ->> 'name') x;
  delete from tallybook.concurrency_limit r
   where r.in_code = p_app and not exists (select from jsonb_array_elements(p_rules -> 'concurrency') x
                                           where x ->> 'name' = r.name);
  perform tallybook.concurrency_limit_set(x ->> 'name', (x ->> 'most')::int, p_app)
     from (select x from jsonb_array_elements(p_rules -> 'concurrency') x order by x ->> 'name') x;
  perform tallybook.breaker_drop(r.name) from tallybook.breaker_rule r
   where r.in_code = p_app and not exists (select from jsonb_array_elements(p_rules -> 'breakers') x
                                           where x ->> 'name' = r.name);
  perform tallybook.breaker_set(x ->> 'name', (x ->> 'failures')::int, (x ->> 'per')::interval,
                                (x ->> 'open_for')::interval, p_app)
     from (select x from jsonb_array_elements(p_rules -> 'breakers') x order by x ->> 'name') x;
end $$;
