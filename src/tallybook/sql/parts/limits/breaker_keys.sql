-- breaker_keys(from_name, max_keys): the view breaker for pages: its keys by name, from one on, at most max_keys (1 to
-- 1000).
--
-- Keys that are closed, without failures, and have no rule of their own are left out. It looks at 5 times max_keys
-- names: the last of these is there in any case, and the next look goes on from it.
-- Costs the same however many jobs wait: waiting is counted up to 1000, which is 1000 or more. source as in
-- concurrency_keys.
-- Errors: TB005 max_keys out of range. Reads breaker_rule, breaker_state, concurrency_holder, concurrency_line,
-- outcome.
-- rights: operator, reader
create or replace function tallybook.breaker_keys(from_name text default '', max_keys int default 100,
  at timestamptz default clock_timestamp())
returns table (name text, rule text, failures int, per interval, open_for interval, state text, failed_in_window bigint,
  changed_at timestamptz, open_until timestamptz, probe bigint, waiting bigint, source text) language plpgsql stable
-- profile: lookup
as $$
#variable_conflict use_column
declare
  v_name text := breaker_keys.from_name; v_left int := tallybook._keys_most(breaker_keys.max_keys);
  v_looks int := 5 * v_left;
begin
  v_name := least((select s.name from tallybook.breaker_state s where s.name >= v_name order by s.name limit 1),
                  (select r.name from tallybook.breaker_rule r where r.name >= v_name order by r.name limit 1));
  while v_name is not null and v_left > 0 and v_looks > 0 loop
    return query
    select x.* from (
      select v_name, r.name, r.failures, r.per, r.open_for,
             case when s.state = 'open' and s.open_until <= breaker_keys.at then 'half-open'
                  else coalesce(s.state, 'closed') end,
             (select count(*) from unnest(s.failed_at) f where f > breaker_keys.at - r.per),
             s.changed_at, case when s.state = 'open' then s.open_until end,
             (select h.job_id from tallybook.concurrency_holder h where h.name = v_name and h.probe and not exists (
                select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid
                       and o.entry_seq = h.seq) limit 1),
             (select count(*) from (select from tallybook.concurrency_line l where l.name = v_name limit 1000) x),
             (select coalesce(b.in_code, '') from tallybook.breaker_rule b where b.name = v_name)
        from (select) one
        left join lateral (
          select b.name, b.failures, b.per, b.open_for from tallybook.breaker_rule b
                 where b.name in (v_name, split_part(v_name, ':', 1))
           order by b.name = v_name desc limit 1) r on true
        left join lateral (select x.* from tallybook.breaker_state x where x.name = v_name) s on true
    ) x (name, rule, failures, per, open_for, state, failed_in_window, changed_at, open_until, probe, waiting, source)
     where x.source is not null or x.state <> 'closed' or x.failed_in_window > 0 or x.waiting > 0 or v_looks = 1;
    v_left := v_left - found::int;
    v_looks := v_looks - 1;
    v_name := least((select s.name from tallybook.breaker_state s where s.name > v_name order by s.name limit 1),
                    (select r.name from tallybook.breaker_rule r where r.name > v_name order by r.name limit 1));
  end loop;
end $$;
