-- breaker_keys(from_name, max_keys): list the keys of the view breaker in pages: by name, from from_name on, at most
-- max_keys (1 to 1000).
--
-- Closed keys without failures and without a rule of their own are left out. A call reads at most 5 times max_keys
-- names and always returns the last of them, from which the next call continues.
-- The cost does not depend on the number of waiting jobs: waiting is counted up to 1000, which means 1000 or more.
-- source as in concurrency_keys.
-- Errors: TB005 max_keys out of range. Reads limit_rule, breaker_state, concurrency_holder, concurrency_line,
-- outcome.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook.breaker_keys(from_name text default '', max_keys int default 100,
  at timestamptz default clock_timestamp())
returns table (name text, rule text, failures int, per interval, open_for interval, state text, failed_in_window bigint,
  changed_at timestamptz, open_until timestamptz, probe bigint, waiting bigint, source text) language sql stable as $$
  select x.* from tallybook._limit_keys_from('breaker', breaker_keys.from_name, breaker_keys.max_keys) k
   cross join lateral (
    select k.name, k.rule, k.most, k.per, k.open_for,
           case when s.state = 'open' and s.open_until <= breaker_keys.at then 'half-open'
                else coalesce(s.state, 'closed') end as state,
           (select count(*) from unnest(s.failed_at) f where f > breaker_keys.at - k.per) as failed,
           s.changed_at, case when s.state = 'open' then s.open_until end,
           (select h.job_id from tallybook._permit_held h where h.name = k.name and h.probe limit 1),
           (select count(*) from (select from tallybook.concurrency_line l where l.name = k.name limit 1000) x)
             as waiting, k.source
      from (select) one left join tallybook.breaker_state s on s.name = k.name) x
   where x.source is not null or x.state <> 'closed' or x.failed > 0 or x.waiting > 0 or k.last
   limit breaker_keys.max_keys
$$;
