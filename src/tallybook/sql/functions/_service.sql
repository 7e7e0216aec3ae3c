-- _service_claim(name, at): whether the caller may run this service now; nobody else does until its transaction has ended.
--
-- An advisory lock (class 1413565449) that is only tried. The services are safe beside each other all the same (they skip
-- what is locked), so one that nobody has put on record for long is run whoever holds the lock: a person's open transaction
-- that has called a service must not stop it for everybody.
create or replace function tallybook._service_claim(p_name text, p_at timestamptz default clock_timestamp()) returns boolean
language sql as $$
  select pg_try_advisory_xact_lock(1413565449, hashtext(p_name))
      or coalesce((select s.last_run_at < p_at - greatest(10 * s.every, interval '30 s') from tallybook.service s where s.name = p_name), true)
$$;

-- _service_ran(name, started_at, effect): puts a run on record, at most one a second, and never waits for the row.
create or replace function tallybook._service_ran(p_name text, p_started_at timestamptz, p_effect bigint) returns void
language sql as $$
  update tallybook.service s set last_run_at = p_started_at, last_took = clock_timestamp() - p_started_at, last_effect = p_effect
   where s.name = (select x.name from tallybook.service x
                    where x.name = p_name and (x.last_run_at is null or x.last_run_at not between p_started_at - interval '1 s' and p_started_at)
                      for update skip locked)
$$;
