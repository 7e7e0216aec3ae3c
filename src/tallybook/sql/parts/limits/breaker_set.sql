-- breaker_set(name, failures, per, open_for): a circuit breaker: after so many failures within per the jobs of a key
-- wait.
--
-- Open for open_for; then one job is let through as a probe. It completes: the others go on. It fails: open once more.
-- What runs when it opens is not touched, and a job that waits counts no failure. Names as in rate_limit_set; a key may
-- have all three kinds of rules.
--   in_code  the app whose code declares it; a person's rule of that name stays as it is then
-- Failures are those of jobs that name the key, of its queue or its task: attempts that failed or died; not snoozes,
-- cancels, lost workers.
-- Returns created, changed or unchanged. Errors: TB005. Writes breaker_rule.
-- rights: operator
create or replace function tallybook.breaker_set(name text, failures int, per interval, open_for interval,
  in_code text default null, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  v_there tallybook.breaker_rule;
begin
  perform tallybook._check_limit_name(name);
  if failures is null or failures not between 1 and 1000 then
    raise exception 'failures % is out of range', coalesce(failures::text, 'null') using errcode = 'TB005',
      hint = 'It goes from 1 to 1000.';
  end if;
  if per is null or per not between interval '1 s' and interval '366 days' then
    raise exception 'per % is out of range', coalesce(per::text, 'null') using errcode = 'TB005',
      hint = 'It goes from 1 s to 366 days.';
  end if;
  if open_for is null or open_for not between interval '1 s' and interval '366 days' then
    raise exception 'open_for % is out of range', coalesce(open_for::text, 'null') using errcode = 'TB005',
      hint = 'It goes from 1 s to 366 days.';
  end if;
  loop
    select r.* into v_there from tallybook.breaker_rule r where r.name = breaker_set.name for update;
    if found then
      if in_code is not null and v_there.in_code is null then return 'unchanged'; end if;
      if (v_there.failures, v_there.per, v_there.open_for, v_there.in_code) is not distinct
         from (failures, per, open_for, in_code) then
        return 'unchanged';
      end if;
      update tallybook.breaker_rule r set failures = breaker_set.failures, per = breaker_set.per,
        open_for = breaker_set.open_for,
             in_code = breaker_set.in_code, changed_at = breaker_set.at
       where r.name = breaker_set.name;
      return 'changed';
    end if;
    insert into tallybook.breaker_rule (name, failures, per, open_for, in_code, created_at, changed_at)
    values (breaker_set.name, failures, per, open_for, in_code, at, at) on conflict do nothing;
    if found then return 'created'; end if;
  end loop;
end $$;
