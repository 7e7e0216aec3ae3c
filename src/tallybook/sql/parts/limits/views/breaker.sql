-- breaker: each key of a circuit breaker with its state, failures and waiting jobs; and the rules that no key of the
-- same name uses.
--> Each key of a circuit breaker: its rule, state, failures and waiting jobs.
-- rights: operator, reader
create or replace view tallybook.breaker as
select k.name, k.rule, k.most as failures, k.per, k.open_for,
       case when s.state = 'open' and s.open_until <= clock_timestamp() then 'half-open'
            else coalesce(s.state, 'closed') end as state,
       (select count(*) from unnest(s.failed_at) f where f > clock_timestamp() - k.per) as failed_in_window,
       s.changed_at, case when s.state = 'open' then s.open_until end as open_until,
       (select h.job_id from tallybook._permit_held h where h.name = k.name and h.probe limit 1) as probe,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from tallybook._limit_key_rule k left join tallybook.breaker_state s on s.name = k.name
 where k.kind = 'breaker' and k.rule is not null;
