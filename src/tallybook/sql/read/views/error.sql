-- error: every failure of every job whose history is kept, as it is on record: what failed, when, why. Newest first by
-- index:
-- "order by ended_at desc limit 50". One state each, since the index of what did not complete goes by state.
-- rights: operator; reader (ended_at, queue, task, job_id, attempt, state, type)
create or replace view tallybook.error as
select o.ended_at, l.queue, e.task, case when e.options ? 'subject'
       then e.unique_key end as subject, o.job_id, e.attempt,
       o.state::text as state, o.error ->> 'type' as type, o.error ->> 'message' as message,
       o.error -> 'details' as details, o.error ->> 'ref_id' as ref_id, o.error
  from (select f.* from tallybook.outcome f where f.state = 'failed'
        union all select f.* from tallybook.outcome f where f.state = 'dead'
        union all select f.* from tallybook.outcome f where f.state = 'lost') o
  join lateral (select x.task, x.options, x.unique_key, x.attempt, x.lane_id from tallybook.entry x
                 where x.job_id = o.job_id and x.retention = o.retention and x.xid = o.entry_xid and x.seq = o.entry_seq
                       limit 1) e on true
  join lateral (select n.queue from tallybook.lane n where n.lane_id = e.lane_id limit 1) l on true;
comment on view tallybook.error is 'Every failure on record: what, when, why. Newest first by index.';
