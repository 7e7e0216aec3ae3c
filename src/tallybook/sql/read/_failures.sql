-- _failures_said(most): the newest failures with errors, for `tallybook top`; _failures(most): without errors, for
-- readers.
--
-- The view error has the same rows, except those hidden by a queue's error_retention. A query for its newest rows reads
-- and sorts all of them, because no plan uses the order of an index through its union. This reads `most` rows of each
-- state. Reads outcome, entry, lane.
-- profile: nested
-- rights: operator
create or replace function tallybook._failures_said(p_most int)
returns table (ended_at timestamptz, queue text, task text, job_id bigint, attempt int, state text, type text,
  message text) language plpgsql stable
set enable_nestloop = on set enable_sort = off set max_parallel_workers_per_gather = 0  -- newest first, by index
as $$
begin
  return query
  select o.ended_at, l.queue, e.task, o.job_id, e.attempt, o.state::text, o.error ->> 'type', o.error ->> 'message'
    from (select f.* from unnest('{failed,dead,lost}'::tallybook.ending[]) s(state), lateral (
            select x.* from tallybook.outcome x where x.state = s.state and x.state <> 'completed'
             order by x.ended_at desc limit p_most) f
           order by f.ended_at desc limit p_most) o
    join lateral (select x.task, x.attempt, x.lane_id from tallybook.entry x
                   where x.job_id = o.job_id and x.retention = o.retention and x.xid = o.entry_xid
                         and x.seq = o.entry_seq limit 1) e on true
    join lateral (select n.queue from tallybook.lane n where n.lane_id = e.lane_id limit 1) l on true
   order by o.ended_at desc;
end $$;

-- rights: operator, reader
create or replace function tallybook._failures(p_most int)
returns table (ended_at timestamptz, queue text, task text, job_id bigint, attempt int, state text, type text,
               message text) language sql stable as $$
  select f.ended_at, f.queue, f.task, f.job_id, f.attempt, f.state, f.type, null::text
         from tallybook._failures_said(p_most) f
$$;
