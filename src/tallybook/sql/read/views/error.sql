-- error: every recorded failure: job, time, error. It is kept as long as the history of its job, or as long as its
-- queue's error_retention; if that is longer, it was copied into error_kept.
-- Newest first by index: "order by ended_at desc limit 50". One branch per state, because the index of outcomes that
-- are not completed begins with the state.
--> Every recorded failure. Newest first by index.
-- rights: operator; reader (ended_at, queue, task, job_id, attempt, state, type)
create or replace view tallybook.error as
select o.ended_at, coalesce((o.kept).queue, l.queue) as queue, coalesce((o.kept).task, e.task) as task,
       case when e.options ? 'subject' then e.unique_key else (o.kept).subject end as subject, o.job_id,
       coalesce((o.kept).attempt, e.attempt) as attempt,
       o.state::text as state, o.error ->> 'type' as type, o.error ->> 'message' as message,
       o.error -> 'details' as details, o.error ->> 'ref_id' as ref_id, o.error
  from (select f.*, null::tallybook.error_kept as kept from tallybook.outcome f where f.state = 'failed'
        union all select f.*, null from tallybook.outcome f where f.state = 'dead'
        union all select f.*, null from tallybook.outcome f where f.state = 'lost'
        union all select null, null, k.ended_at, k.state, null, k.job_id, k.error, null, k
          from tallybook.error_kept k) o
  left join lateral (select x.task, x.options, x.unique_key, x.attempt, x.lane_id from tallybook.entry x
                      where x.job_id = o.job_id and x.retention = o.retention and x.xid = o.entry_xid
                            and x.seq = o.entry_seq limit 1) e on true
  left join lateral (select n.queue from tallybook.lane n where n.lane_id = e.lane_id limit 1) l on true
  left join tallybook.queue q on q.name = coalesce((o.kept).queue, l.queue)
 where coalesce(o.ended_at > now() - q.error_retention, (o.kept).queue is null)
   and coalesce((o.kept).task, e.task) is not null;
