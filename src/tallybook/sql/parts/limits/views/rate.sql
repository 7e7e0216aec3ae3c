-- rate: each key of a rate limit that is in use: where it stands, who waits, what was let through in the last window;
-- and the rules that no key of their own name has used.
-- rights: operator, reader
create or replace view tallybook.rate as
select s.name, r.name as rule, r.most as calls, r.per, r.burst, s.granted as calls_ever,
       (select count(*) from tallybook.rate_call c where c.name = s.name
        and c.called_at > clock_timestamp() - r.per) as calls_in_window,
       (select count(*) from tallybook.scheduled w where w.options ? 'turn'
        and w.options ->> 'turn' = s.name) as waiting,
       (select max(c.called_at) from tallybook.rate_call c where c.name = s.name) as last_call_at,
       nullif(s.next_at, '-infinity') as next_call_at,
       case when s.pushed_to > clock_timestamp() then s.pushed_to end as pushed_to
  from tallybook.rate_state s
  left join lateral (
    select r.* from tallybook.limit_rule r where r.kind = 'rate' and r.name in (s.name, split_part(s.name, ':', 1))
     order by r.name = s.name desc limit 1) r on true
union all
select l.name, l.name, l.most, l.per, l.burst, 0, 0, 0, null, null, null from tallybook.limit_rule l
 where l.kind = 'rate' and not exists (select from tallybook.rate_state s where s.name = l.name);
comment on view tallybook.rate is 'Each key of a rate limit: its rule, its calls, who waits for it.';
