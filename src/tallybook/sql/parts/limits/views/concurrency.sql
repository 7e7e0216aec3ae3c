-- concurrency: each key of a concurrency limit with held permits or waiting jobs, and the rules without a used key.
--> Each key of a concurrency limit: its rule, held permits and waiting jobs.
-- rights: operator, reader
create or replace view tallybook.concurrency as
select k.name, k.rule, k.most, (select count(*) from tallybook._permit_held h where h.name = k.name) as held,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from tallybook._limit_key_rule k where k.kind = 'concurrency'
   -- without a rule, it waits at the breaker of this name
   and (k.rule is not null or not exists (select from tallybook.breaker b where b.name = k.name));
