-- breaker: each key of a circuit breaker: where it stands, its failures, who waits; and the rules that no key of their
-- own name has used.
-- rights: operator, reader
create or replace view tallybook.breaker as
select k.name, r.name as rule, r.most as failures, r.per, r.open_for,
       case when s.state = 'open' and s.open_until <= clock_timestamp() then 'half-open'
            else coalesce(s.state, 'closed') end as state,
       (select count(*) from unnest(s.failed_at) f where f > clock_timestamp() - r.per) as failed_in_window,
       s.changed_at, case when s.state = 'open' then s.open_until end as open_until,
       (select h.job_id from tallybook.concurrency_holder h
         where h.name = k.name and h.probe and not exists (
           select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid
                  and o.entry_seq = h.seq) limit 1) as probe,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from (select distinct n.name from tallybook._limit_key_name n where n.kind = 'breaker') k
  left join tallybook.breaker_state s on s.name = k.name
  join lateral (
    select r.* from tallybook.limit_rule r where r.kind = 'breaker' and r.name in (k.name, split_part(k.name, ':', 1))
     order by r.name = k.name desc limit 1) r on true;
comment on view tallybook.breaker is
  'Each key of a circuit breaker: its rule, its state, its failures, who waits for it.';
