-- _limits_register(app, rules): store the limits that an app's code declares, at the start of a worker.
--
-- Changes differing ones, and deletes those without a declaration. A person's rule of the same name stays.
-- Kind by kind, in the order of their names, so no two workers wait for each other. Writes limit_rule; see the
-- verbs that set and drop a limit.
-- rights: worker
create or replace function tallybook._limits_register(p_app text, p_rules jsonb) returns void
language plpgsql as $$
declare k record; v_gone text[];
begin
  for k in values ('rate', 'rates'), ('concurrency', 'concurrency'), ('breaker', 'breakers') loop
    v_gone := array(select r.name from tallybook.limit_rule r
                     where r.kind = k.column1 and r.in_code = p_app and r.name not in (
                             select x ->> 'name' from jsonb_array_elements(p_rules -> k.column2) x)
                     order by r.name for update);
    perform case k.column1
              when 'rate' then tallybook.rate_limit_drop(n)
              when 'concurrency' then tallybook.concurrency_limit_drop(n)
              else tallybook.breaker_drop(n) end
       from unnest(v_gone) n;
    perform case k.column1
              when 'rate' then tallybook.rate_limit_set(x.name, x.calls, x.per, x.burst, p_app)
              when 'concurrency' then tallybook.concurrency_limit_set(x.name, x.most, p_app, skips => x.skips)
              else tallybook.breaker_set(x.name, x.failures, x.per, x.open_for, p_app) end
       from (select f.* from jsonb_to_recordset(p_rules -> k.column2)
               f(name text, calls int, most int, failures int, per interval, burst int, open_for interval,
                 skips boolean)
              order by f.name) x;
  end loop;
end $$;
