-- _limit_key_name: the names of the keys of each kind of limit that are on record or have a rule; some come twice.
create or replace view tallybook._limit_key_name as
select 'rate' as kind, s.name from tallybook.rate_state s
union all select 'breaker', s.name from tallybook.breaker_state s
union all select 'concurrency', h.name from tallybook.concurrency_holder h
union all select 'concurrency', l.name from tallybook.concurrency_line l
union all select r.kind, r.name from tallybook.limit_rule r;
