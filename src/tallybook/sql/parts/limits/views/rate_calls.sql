-- rate_calls: all calls that a limit has granted, with the end of their attempt (null: it has not ended).
--> The call log of the rate limits: key, time, job and success.
-- rights: operator, reader
create or replace view tallybook.rate_calls as
select c.name, c.called_at, c.job_id, c.attempt, o.state = 'completed' as success, o.ended_at
  from tallybook.rate_call c
  left join lateral (
    select e.retention, e.xid, e.seq from tallybook.entry e where e.job_id = c.job_id and e.attempt = c.attempt
           limit 1) e on true
  left join lateral (
    select o.state, o.ended_at from tallybook.outcome o
     where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1) o on true;
