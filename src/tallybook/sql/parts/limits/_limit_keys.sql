-- _limit_keys(names, newcomers, ahead, at): the state of these keys that have or had a rule. Locks their rows in the
-- order of the names until the end of the transaction. Rows of new keys are created before, in that order.
--   newcomers  a job that has not waited asks: find the end of the waiting jobs
--   ahead      how long the caller needs from the call to the start: its starts may be late by as much, up to 1 s
-- Jobs that wait for a permit continue first. Each scheduled job whose options.turn is the key counts as waiting for
-- it. After its turn, and if it is given another time, that is empty: see _turn_over.
-- Reads the rules, scheduled, tombstone; writes rate_state, see _let_in.
-- profile: nested
create or replace function tallybook._limit_keys(p_names text[], p_newcomers boolean, p_ahead interval,
  p_at timestamptz)
returns tallybook._limit_key[] language plpgsql
set enable_memoize = off  -- each row is looked up once: there is nothing to remember
as $$
declare
  c_early constant interval := '120 ms';  -- a waiting job comes back this long before its turn
  v_keys tallybook._limit_key[]; k tallybook._limit_key; v_names text[] := p_names;
  v_permits boolean := exists (select from tallybook.limit_rule r where r.kind <> 'rate');
begin
  loop
    -- Lock all rows or none: a session that has locked rows and creates another would wait for one that has
    -- created that row and waits for these.
    select array_agg(row(s.name, s.next_at, s.front_at, s.granted, null, r.per / (r.most - r.burst + 1),
                         tallybook._step(r.most, r.per, r.burst),
                         case when r.per is not null then
                           greatest(interval '20 ms', least(greatest(r.per / 100, p_ahead), interval '1 s')) end, s.lag,
                         r.burst, r.most - r.burst + 1, null, null, null, null)::tallybook._limit_key)
      into v_keys
      from (select s.name, s.next_at, s.front_at, s.granted, s.lag from tallybook.rate_state s
             where s.name = any (v_names)
               and (select count(*) from tallybook.rate_state x where x.name = any (v_names)) = cardinality(v_names)
             order by s.name for update) s
      left join lateral tallybook._limit_of('rate', s.name) r on true;
    exit when coalesce(cardinality(v_keys), 0) = cardinality(v_names);
    v_names := array(select n from unnest(p_names) n
                      where exists (select from tallybook.rate_state s where s.name = n)
                         or exists (select from tallybook.limit_rule r
                                     where r.kind in ('rate', 'concurrency', 'breaker')
                                       and r.name in (n, split_part(n, ':', 1))));
    -- If another session creates the same row, this waits for its commit, inserts nothing, and the next round reads
    -- it.
    insert into tallybook.rate_state (name, next_at, front_at, granted)
    select n, '-infinity', '-infinity', 0 from unnest(v_names) n order by n on conflict do nothing;
  end loop;
  -- Read after the locks. If no job waits for a key any more, the one in front was cancelled.
  if p_newcomers or exists (select from unnest(v_keys) x where x.front_at > '-infinity') then
    v_keys := array(
      select row(x.name, x.next_at, case when w.tail_at is null then '-infinity' else x.front_at end, x.granted,
                 w.tail_at, x.gap, x.step, x.late, x.lag, x.burst, x.every, x.free, x.probing, x.barred,
                 x.has_line)::tallybook._limit_key
        from unnest(v_keys) x left join lateral (
          select w.run_at + c_early + x.step as tail_at from tallybook.scheduled w
           where w.options ? 'turn' and w.options ->> 'turn' = x.name
             and not exists (select from tallybook.tombstone t where t.job_id = w.job_id and t.cancelled)
           order by w.run_at desc limit 1) w on true);
  end if;
  if not v_permits then return v_keys; end if;
  foreach k in array coalesce(v_keys, '{}') loop
    perform tallybook._let_in(k.name, p_at, 50)
      where exists (select from tallybook.concurrency_line l where l.name = k.name);
  end loop;
  -- Last, because jobs that continue take permits of other keys, too.
  for i in 1..coalesce(cardinality(v_keys), 0) loop
    k := v_keys[i];
    select x.free, x.probing, x.barred into k.free, k.probing, k.barred from tallybook._permits_free(k.name, p_at) x;
    k.has_line := k.free is not null and exists (select from tallybook.concurrency_line l where l.name = k.name);
    v_keys[i] := k;
  end loop;
  return v_keys;
end $$;
