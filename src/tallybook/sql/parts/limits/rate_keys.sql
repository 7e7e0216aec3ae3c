-- rate_keys(from_name, max_keys): list the keys of the view rate in pages: by name, from from_name on, at most max_keys
-- (1 to 1000).
--
-- Unused keys without a rule of their own are left out. A call reads at most 5 times max_keys names and always returns
-- the last of them, from which the next call continues.
-- The cost does not depend on the number of waiting jobs: calls_in_window and waiting are counted up to 1000, which
-- means 1000 or more. source as in concurrency_keys. Errors: TB005 max_keys out of range. Reads limit_rule, rate_state,
-- rate_call, scheduled.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook.rate_keys(from_name text default '', max_keys int default 100,
  at timestamptz default clock_timestamp())
returns table (name text, rule text, calls int, per interval, burst int, calls_ever bigint, calls_in_window bigint,
  waiting bigint, last_call_at timestamptz, next_call_at timestamptz, pushed_to timestamptz, source text)
language sql stable as $$
  select x.* from tallybook._limit_keys_from('rate', rate_keys.from_name, rate_keys.max_keys) k cross join lateral (
    select k.name, k.rule, k.most, k.per, k.burst, coalesce(s.granted, 0),
           (select count(*) from (select from tallybook.rate_call c where c.name = k.name
                                  and c.called_at > rate_keys.at - k.per limit 1000) x) as in_window,
           (select count(*) from (select from tallybook.scheduled w where w.options ? 'turn'
                                  and w.options ->> 'turn' = k.name limit 1000) x) as waiting,
           (select c.called_at from tallybook.rate_call c where c.name = k.name order by c.called_at desc limit 1),
           nullif(s.next_at, '-infinity'), case when s.pushed_to > rate_keys.at then s.pushed_to end as pushed_to,
           k.source
      from (select) one left join tallybook.rate_state s on s.name = k.name) x
   where x.source is not null or x.in_window > 0 or x.waiting > 0 or x.pushed_to is not null or k.last
   limit rate_keys.max_keys
$$;
