-- breaker_open(name, duration): open the breaker of a key by hand: for this time, none of its jobs starts.
--
-- duration: how long it stays open; null: the rule's open_for. After that a probe starts, as usual. Running jobs
-- continue; how they end neither closes the breaker nor keeps it open longer. Returns the time until which it is open.
-- Errors: TB005 unknown breaker, or a duration out of range. Locks the key's row. Writes rate_state, breaker_state,
-- concurrency_holder.
-- rights: operator
create or replace function tallybook.breaker_open(name text, duration interval default null,
  at timestamptz default clock_timestamp())
returns timestamptz language sql as $$
  select b.until from tallybook._breaker_by_hand(breaker_open.name, 'open', duration, at) b
$$;

-- _breaker_by_hand(name, state, duration, at): set the state of a key's breaker. A running probe is not a probe any
-- more. was: its former state; null: none. until: the time until which it is open; null: it is closed.
create or replace function tallybook._breaker_by_hand(p_name text, p_state text, p_duration interval,
  p_at timestamptz, out was text, out until timestamptz) language plpgsql as $$
declare v_rule tallybook.limit_rule;
begin
  select r.* into v_rule from tallybook._limit_of('breaker', p_name) r;
  perform tallybook._refuse(not found, 'there is no breaker ' || p_name, 'Set its rule first.');
  p_duration := coalesce(p_duration, v_rule.open_for);
  perform tallybook._check_range('duration', p_duration::text, p_duration between interval '0' and interval '100 years',
                                 'It must be from 0 to 100 years.');
  if p_state = 'open' then until := p_at + p_duration; end if;
  select s.state into was from tallybook.breaker_state s where s.name = p_name;
  if was is null and p_state = 'closed' then return; end if;  -- an unused key
  insert into tallybook.rate_state (name, next_at, front_at, granted)
    values (p_name, '-infinity', '-infinity', 0) on conflict do nothing;
  perform from tallybook.rate_state s where s.name = p_name for update;
  perform tallybook._permits_free(p_name, p_at);  -- ends until now count for the former state
  update tallybook.concurrency_holder h set probe = false where h.name = p_name and h.probe;
  insert into tallybook.breaker_state as s (name, state, changed_at, open_until) values (p_name, p_state, p_at, until)
  on conflict (name) do update set state = excluded.state, open_until = excluded.open_until, failed_at = '{}',
     changed_at = case when s.state = excluded.state then s.changed_at else excluded.changed_at end;
  perform tallybook._wake(' concurrency_release');
end $$;
