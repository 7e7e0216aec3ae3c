-- rate: each used key of a rate limit with its next call, waiting jobs and calls in the last window; and the rules that
-- no key of the same name uses.
--> Each key of a rate limit: its rule, calls and waiting jobs.
-- rights: operator, reader
create or replace view tallybook.rate as
select k.name, k.rule, k.most as calls, k.per, k.burst, coalesce(s.granted, 0) as calls_ever,
       (select count(*) from tallybook.rate_call c
         where c.name = k.name and c.called_at > clock_timestamp() - k.per) as calls_in_window,
       (select count(*) from tallybook.scheduled w
         where w.options ? 'turn' and w.options ->> 'turn' = k.name) as waiting,
       (select max(c.called_at) from tallybook.rate_call c where c.name = k.name) as last_call_at,
       nullif(s.next_at, '-infinity') as next_call_at,
       case when s.pushed_to > clock_timestamp() then s.pushed_to end as pushed_to
  from tallybook._limit_key_rule k left join tallybook.rate_state s on s.name = k.name
 -- Keys of all kinds have a row in rate_state, which is their lock.
 where k.kind = 'rate' and (k.rule is not null or s.granted > 0 or s.pushed_to is not null);
