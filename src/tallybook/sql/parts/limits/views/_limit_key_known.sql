-- _limit_key_known: the keys of each kind of limit that are recorded or have a rule of their own; some come twice.
create or replace view tallybook._limit_key_known as
select 'rate' as kind, s.name from tallybook.rate_state s
union all select 'breaker', s.name from tallybook.breaker_state s
union all select 'concurrency', h.name from tallybook.concurrency_holder h
union all select 'concurrency', l.name from tallybook.concurrency_line l
union all select r.kind, r.name from tallybook.limit_rule r;

-- _limit_key_rule: each of them once, with its rule: that of its own name, else of the name before the first colon.
create or replace view tallybook._limit_key_rule as
select k.kind, k.name, r.name as rule, r.most, r.per, r.burst, r.open_for
  from (select distinct n.kind, n.name from tallybook._limit_key_known n) k
  left join lateral (
    select x.* from tallybook.limit_rule x where x.kind = k.kind and x.name in (k.name, split_part(k.name, ':', 1))
     order by x.name = k.name desc limit 1) r on true;

-- _permit_held: the attempts that hold a permit: those that have not ended.
create or replace view tallybook._permit_held as
select h.* from tallybook.concurrency_holder h
 where not exists (select from tallybook.outcome o
                    where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq);
