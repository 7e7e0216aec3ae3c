-- _service_claim(name, at): whether the caller may run this service now; nobody else does until its transaction has
-- ended.
--
-- Advisory locks (class 1413565449) that are only tried: of the ten seconds that the caller is in, and of the ten
-- before. So whoever is in the same or the next ten is refused, and a claim that is stuck (a person's open transaction
-- that has run a service) holds the service up for 20 s at most. The services are safe beside each other all the same:
-- they skip what is locked. A run that takes longer than 10 s may get company.
-- Mends what a step of the server's clock has left, see _clock_back.
create or replace function tallybook._service_claim(p_name text,
  p_at timestamptz default clock_timestamp()) returns boolean
language plpgsql as $$
declare
  v_ten bigint := floor(extract(epoch from p_at) / 10);
begin
  if not (pg_try_advisory_xact_lock(1413565449, hashtext(p_name || ' ' || v_ten - 1))
          and pg_try_advisory_xact_lock(1413565449, hashtext(p_name || ' ' || v_ten))) then
    return false;
  end if;
  perform tallybook._clock_back(p_at);
  return true;
end $$;

-- _service_ran(name, at, effect): puts a run on record, at most one a second, and never waits for the row. It took as
-- long as the statement that it was.
create or replace function tallybook._service_ran(p_name text, p_at timestamptz, p_effect bigint) returns void
language sql as $$
  update tallybook.service s set last_run_at = p_at, last_took = clock_timestamp() - statement_timestamp(),
    last_effect = p_effect
   where s.name = (select x.name from tallybook.service x
                    where x.name = p_name and (x.last_run_at is null or x.last_run_at not between p_at - interval '1 s'
                                               and p_at)
                      for update skip locked)
$$;
