-- concurrency_keys(from_name, max_keys): list the keys of the view concurrency in pages: by name, from from_name on, at
-- most max_keys (1 to 1000).
--
-- Unused keys without a rule of their own are left out. A call reads at most 5 times max_keys names and always returns
-- the last of them, from which the next call continues.
-- The cost does not depend on the number of waiting jobs: held and waiting are counted up to 1000, which means 1000 or
-- more. source: the app whose code declares the key's own rule; empty: a user set it; null: the key has no rule of its
-- own. Errors: TB005 max_keys out of range. Reads limit_rule, concurrency_holder, concurrency_line, outcome.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook.concurrency_keys(from_name text default '', max_keys int default 100)
returns table (name text, rule text, most int, held bigint, waiting bigint, source text) language sql stable as $$
  select x.* from tallybook._limit_keys_from('concurrency', concurrency_keys.from_name, concurrency_keys.max_keys) k
    cross join lateral (
    select k.name, k.rule, k.most,
           (select count(*) from (select from tallybook._permit_held h where h.name = k.name limit 1000) x) as held,
           (select count(*) from (select from tallybook.concurrency_line l where l.name = k.name limit 1000) x)
             as waiting, k.source offset 0) x
   where x.source is not null or k.last
      -- jobs that wait for a breaker are in the same line
      or (x.held > 0 or x.waiting > 0)
         and (x.rule is not null or not exists (select from tallybook._limit_of('breaker', k.name)))
   limit concurrency_keys.max_keys
$$;

-- _limit_keys_from(kind, from_name, max_keys): the keys of a kind with their rules, by name, each found by
-- an index. source: as in concurrency_keys; last: the search ends here, after 5 times max_keys.
create or replace function tallybook._limit_keys_from(p_kind text, p_from text, p_max_keys int)
returns table (name text, rule text, most int, per interval, burst int, open_for interval, source text, last boolean)
language sql stable as $$
  with recursive k(name, looks) as (
    select (select n.name from tallybook._limit_key_known n where n.kind = p_kind and n.name >= p_from
             order by n.name limit 1), 5 * tallybook._keys_most(p_max_keys)
    union all
    select (select n.name from tallybook._limit_key_known n where n.kind = p_kind and n.name > k.name
             order by n.name limit 1), k.looks - 1 from k where k.name is not null and k.looks > 1)
  select k.name, r.name, r.most, r.per, r.burst, r.open_for,
         case when r.name = k.name then coalesce(r.in_code, '') end, k.looks = 1
    from k left join lateral tallybook._limit_of(p_kind, k.name) r on true where k.name is not null
$$;

-- _keys_most(max_keys): raise TB005 unless it is from 1 to 1000.
create or replace function tallybook._keys_most(p_max_keys int) returns int
language plpgsql immutable as $$
begin
  perform tallybook._check_range('max_keys', p_max_keys::text, p_max_keys between 1 and 1000,
                                 'It must be from 1 to 1000.');
  return p_max_keys;
end $$;
