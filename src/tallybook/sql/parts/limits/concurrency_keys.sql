-- concurrency_keys(from_name, max_keys): the view concurrency for pages: its keys by name, from one on, at most
-- max_keys (1 to 1000).
--
-- Keys that are not in use and have no rule of their own are left out. It looks at 5 times max_keys names: the last of
-- these is there in any case, and the next look goes on from it.
-- Costs the same however many jobs wait: held and waiting are counted up to 1000, which is 1000 or more. source: the
-- app whose code declares the key's own rule; empty: a person has put it; null: it has none of its own.
-- Errors: TB005 max_keys out of range. Reads concurrency_limit, concurrency_holder, concurrency_line, outcome,
-- breaker_rule.
-- rights: operator, reader
create or replace function tallybook.concurrency_keys(from_name text default '', max_keys int default 100)
returns table (name text, rule text, most int, held bigint, waiting bigint, source text) language plpgsql stable
-- profile: lookup
as $$
#variable_conflict use_column
declare
  v_name text := concurrency_keys.from_name; v_left int := tallybook._keys_most(concurrency_keys.max_keys);
  v_looks int := 5 * v_left;
begin
  v_name := least((select h.name from tallybook.concurrency_holder h where h.name >= v_name order by h.name limit 1),
                  (select l.name from tallybook.concurrency_line l where l.name >= v_name order by l.name limit 1),
                  (select c.name from tallybook.concurrency_limit c where c.name >= v_name order by c.name limit 1));
  while v_name is not null and v_left > 0 and v_looks > 0 loop
    return query
    select x.* from (
      select v_name, r.name, r.most,
             (select count(*) from (select from tallybook.concurrency_holder h where h.name = v_name and not exists (
                select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid
                       and o.entry_seq = h.seq) limit 1000) x),
             (select count(*) from (select from tallybook.concurrency_line l where l.name = v_name limit 1000) x),
             (select coalesce(c.in_code, '') from tallybook.concurrency_limit c where c.name = v_name)
        from (select) one
        left join lateral (
          select c.name, c.most from tallybook.concurrency_limit c where c.name in (v_name, split_part(v_name, ':', 1))
           order by c.name = v_name desc limit 1) r on true
    ) x (name, rule, most, held, waiting, source)
     where x.source is not null or v_looks = 1
        -- who waits for a breaker stands in the same line
        or (x.held > 0 or x.waiting > 0) and (x.rule is not null or not exists (
             select from tallybook.breaker_rule b where b.name in (v_name, split_part(v_name, ':', 1))));
    v_left := v_left - found::int;
    v_looks := v_looks - 1;
    v_name := least((select h.name from tallybook.concurrency_holder h where h.name > v_name order by h.name limit 1),
                    (select l.name from tallybook.concurrency_line l where l.name > v_name order by l.name limit 1),
                    (select c.name from tallybook.concurrency_limit c where c.name > v_name order by c.name limit 1));
  end loop;
end $$;

-- _keys_most(max_keys): TB005 unless it is 1 to 1000.
create or replace function tallybook._keys_most(p_max_keys int) returns int
language plpgsql immutable as $$
begin
  if p_max_keys is null or p_max_keys not between 1 and 1000 then
    raise exception 'max_keys % is out of range', coalesce(p_max_keys::text, 'null') using errcode = 'TB005',
      hint = 'It goes from 1 to 1000.';
  end if;
  return p_max_keys;
end $$;
