-- rate: each key of a rate limit that is in use: where it stands, who waits, what was let through in the last window; and the
-- rules that no key of their own name has used.
create or replace view tallybook.rate as
select s.name, r.name as rule, r.calls, r.per, r.burst, s.granted as calls_ever,
       (select count(*) from tallybook.rate_call c where c.name = s.name and c.called_at > clock_timestamp() - r.per) as calls_in_window,
       (select count(*) from tallybook.scheduled w where w.options ? 'turn' and w.options ->> 'turn' = s.name) as waiting,
       (select max(c.called_at) from tallybook.rate_call c where c.name = s.name) as last_call_at,
       nullif(s.next_at, '-infinity') as next_call_at,
       case when s.pushed_to > clock_timestamp() then s.pushed_to end as pushed_to
  from tallybook.rate_state s
  left join lateral (
    select r.name, r.calls, r.per, r.burst from tallybook.rate_limit r where r.name in (s.name, split_part(s.name, ':', 1))
     order by r.name = s.name desc limit 1) r on true
union all
select l.name, l.name, l.calls, l.per, l.burst, 0, 0, 0, null, null, null from tallybook.rate_limit l
 where not exists (select from tallybook.rate_state s where s.name = l.name);
comment on view tallybook.rate is 'Each key of a rate limit: its rule, its calls, who waits for it.';

-- concurrency: each key of a concurrency limit of which places are held or waited for, and the rules that no key uses.
create or replace view tallybook.concurrency as
select k.name, r.name as rule, r.most,
       (select count(*) from tallybook.concurrency_holder h
         where h.name = k.name and not exists (
           select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq)) as held,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from (select h.name from tallybook.concurrency_holder h union select l.name from tallybook.concurrency_line l
        union select c.name from tallybook.concurrency_limit c) k
  left join lateral (
    select r.name, r.most from tallybook.concurrency_limit r where r.name in (k.name, split_part(k.name, ':', 1))
     order by r.name = k.name desc limit 1) r on true;
comment on view tallybook.concurrency is 'Each key of a concurrency limit: its rule, how many hold a place, how many wait for one.';

-- rate_calls: every call that a limit has let through, with how its attempt ended (null: it has not ended yet).
create or replace view tallybook.rate_calls as
select c.name, c.called_at, c.job_id, c.attempt, o.state = 'completed' as success, o.ended_at
  from tallybook.rate_call c
  left join lateral (
    select e.retention, e.xid, e.seq from tallybook.entry e where e.job_id = c.job_id and e.attempt = c.attempt limit 1) e on true
  left join lateral (
    select o.state, o.ended_at from tallybook.outcome o
     where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true;
comment on view tallybook.rate_calls is 'The call log of the rate limits: key, time, job and success.';
