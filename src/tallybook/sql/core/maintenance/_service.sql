-- _service_claim(name, at): whether the caller may run this service now. Nobody else may until its transaction has
-- ended.
--
-- Tries advisory locks (class 1413565449) of the current ten seconds and of the ten seconds before. So callers in the
-- same or the next ten seconds are refused, and a stuck claim (a person's open transaction that has run a service)
-- stops the service for at most 20 s. Services may still run side by side, because they skip locked rows; a run of more
-- than 10 s may get company.
-- Repairs what a step of the server's clock has left, see _clock_back.
create or replace function tallybook._service_claim(p_name text,
  p_at timestamptz default clock_timestamp()) returns boolean
language plpgsql as $$
declare v_ten bigint := floor(extract(epoch from p_at) / 10);
begin
  if not (pg_try_advisory_xact_lock(1413565449, hashtext(p_name || ' ' || v_ten - 1))
          and pg_try_advisory_xact_lock(1413565449, hashtext(p_name || ' ' || v_ten))) then
    return false;
  end if;
  perform tallybook._clock_back(p_at);
  return true;
end $$;

-- _service_ran(name, at, effect): record a run, at most one a second, without waiting for the row. Its duration is that
-- of the caller's statement.
create or replace function tallybook._service_ran(p_name text, p_at timestamptz, p_effect bigint) returns void
language sql as $$
  update tallybook.service s set last_run_at = p_at, last_took = clock_timestamp() - statement_timestamp(),
    last_effect = p_effect
   where s.name = (select x.name from tallybook.service x
                    where x.name = p_name and (x.last_run_at is null or x.last_run_at not between p_at - interval '1 s'
                                               and p_at)
                      for update skip locked)
$$;
