-- rate_keys(from_name, max_keys): the view rate for pages: its keys by name, from one on, at most max_keys (1 to 1000).
--
-- Keys that are not in use and have no rule of their own are left out. It looks at 5 times max_keys names: the last of
-- these is there in any case, and the next look goes on from it.
-- Costs the same however many jobs wait: calls_in_window and waiting are counted up to 1000, which is 1000 or more.
-- source as in concurrency_keys. Errors: TB005 max_keys out of range. Reads rate_limit, rate_state, rate_call,
-- scheduled.
-- rights: operator, reader
create or replace function tallybook.rate_keys(from_name text default '', max_keys int default 100,
  at timestamptz default clock_timestamp())
returns table (name text, rule text, calls int, per interval, burst int, calls_ever bigint, calls_in_window bigint,
  waiting bigint,
  last_call_at timestamptz, next_call_at timestamptz, pushed_to timestamptz, source text) language plpgsql stable
-- profile: lookup
as $$
#variable_conflict use_column
declare
  v_name text := rate_keys.from_name; v_left int := tallybook._keys_most(rate_keys.max_keys);
  v_looks int := 5 * v_left;
begin
  v_name := least((select s.name from tallybook.rate_state s where s.name >= v_name order by s.name limit 1),
                  (select l.name from tallybook.rate_limit l where l.name >= v_name order by l.name limit 1));
  while v_name is not null and v_left > 0 and v_looks > 0 loop
    return query
    select x.* from (
      select v_name, r.name, r.calls, r.per, r.burst, coalesce(s.granted, 0),
             (select count(*) from (select from tallybook.rate_call c where c.name = v_name
                                    and c.called_at > rate_keys.at - r.per limit 1000) x),
             (select count(*) from (select from tallybook.scheduled w where w.options ? 'turn'
                                    and w.options ->> 'turn' = v_name limit 1000) x),
             (select c.called_at from tallybook.rate_call c where c.name = v_name order by c.called_at desc limit 1),
             nullif(s.next_at, '-infinity'), case when s.pushed_to > rate_keys.at then s.pushed_to end,
             (select coalesce(l.in_code, '') from tallybook.rate_limit l where l.name = v_name)
        from (select) one
        left join lateral (
          select l.name, l.calls, l.per, l.burst from tallybook.rate_limit l
                 where l.name in (v_name, split_part(v_name, ':', 1))
           order by l.name = v_name desc limit 1) r on true
        left join lateral (select x.granted, x.next_at, x.pushed_to from tallybook.rate_state x where x.name = v_name) s
          on true
    ) x (name, rule, calls, per, burst, calls_ever, calls_in_window, waiting, last_call_at, next_call_at, pushed_to,
         source)
     where x.source is not null or x.calls_in_window > 0 or x.waiting > 0 or x.pushed_to is not null or v_looks = 1;
    v_left := v_left - found::int;
    v_looks := v_looks - 1;
    v_name := least((select s.name from tallybook.rate_state s where s.name > v_name order by s.name limit 1),
                    (select l.name from tallybook.rate_limit l where l.name > v_name order by l.name limit 1));
  end loop;
end $$;
