-- _limit_names(): the names of all limits and circuit breakers, of code and of the database.
--
-- Reads limit_rule.
-- rights: worker
create or replace function tallybook._limit_names() returns text[]
language sql stable
as $$ select array(select distinct r.name from tallybook.limit_rule r order by 1) $$;
