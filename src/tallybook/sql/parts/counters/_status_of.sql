-- _edges_of(queue): when the oldest and the newest jobs were enqueued, by lane, task and state. Reads the first and the
-- last 1,000 rows of scheduled, of waiting and of dead, and of each line of this queue; null: of the lines of all
-- queues. The cost does not depend on the number of jobs.
-- profile: nested
create or replace function tallybook._edges_of(p_queue text) returns table (lane_id int, task text, state text,
  oldest timestamptz, newest timestamptz) language plpgsql stable as $$
begin
  return query
  select x.lane_id, x.task, x.job_state, min(x.enqueued_at), max(x.enqueued_at)
    from unnest('{scheduled,waiting,dead}'::text[]) p(place), lateral (
           (select a.* from tallybook._aside a where a.place = p.place order by a.job_id limit 1000)
           union all
           (select a.* from tallybook._aside a where a.place = p.place order by a.job_id desc limit 1000)) x
   group by 1, 2, 3
  union all
  select l.lane_id, x.task, 'available', min(x.enqueued_at), max(x.enqueued_at)
    from tallybook.lane l, lateral (select tallybook._next(l.lane_id, l.retention, l.born) as xid offset 0) n, lateral (
           (select e.task, e.enqueued_at from tallybook.entry e where e.lane_id = l.lane_id
               and e.retention = l.retention and e.xid >= n.xid order by e.xid, e.seq limit 1000)
           union all
           (select e.task, e.enqueued_at from tallybook.entry e where e.lane_id = l.lane_id
               and e.retention = l.retention and e.xid >= n.xid order by e.xid desc, e.seq desc limit 1000)) x
   where (p_queue is null or l.queue = p_queue) and l.retired_at is null and n.xid is not null group by 1, 2;
end $$;

-- _status_of(queue): the rows of the view queue_status of one queue; null: of all. For one queue the lines of the
-- others are not read.
-- profile: nojit
-- rights: operator, reader, metrics
create or replace function tallybook._status_of(p_queue text)
returns table (queue text, task text, state text, jobs bigint, oldest timestamptz, newest timestamptz,
  average_attempts numeric)
language plpgsql stable
set plan_cache_mode = force_generic_plan  -- a plan made anew costs more than it gains
as $$
begin
  return query
  select l.queue, c.task, c.what, sum(c.n)::bigint, min(e.oldest),
         case when c.what in ('completed', 'cancelled') then max(c.last_at) else max(e.newest) end,
         round(sum(c.attempts) / sum(c.n) - (c.what in ('scheduled', 'retrying', 'waiting', 'available'))::int, 2)
    from tallybook._counted_of(p_queue) c
    join tallybook.lane l on l.lane_id = c.lane_id
    left join tallybook._edges_of(p_queue) e on e.lane_id = c.lane_id and e.task = c.task and e.state = c.what
   where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead', 'completed', 'cancelled')
   group by l.queue, c.task, c.what having sum(c.n) <> 0;
end $$;

-- _oldest(queue): since when the next job in the queue's lines could run; null: there is none.
-- rights: operator, reader, metrics
create or replace function tallybook._oldest(p_queue text) returns timestamptz
language sql stable as $$ select o.oldest from tallybook._oldest_of(array[p_queue]) o $$;

-- _oldest_of(queues): the same for many queues, at a fraction of the cost of each; queues without a job in line are
-- left out.
--
-- If no open transaction has written, and the last claim of a lane left no hole, the next job is the entry after the
-- cursor. All other lanes call _next, which is most of the cost.
-- profile: nested
-- rights: operator, reader, metrics
create or replace function tallybook._oldest_of(p_queues text[]) returns table (queue text, oldest timestamptz)
language plpgsql stable as $$
declare
  v_snap pg_snapshot := pg_current_snapshot();
  v_quiet boolean := pg_snapshot_xmin(v_snap) >= pg_snapshot_xmax(v_snap) and pg_current_xact_id_if_assigned() is null;
begin
  return query
  select q.name, min(e.ready_at)
    from unnest(p_queues) q(name)
    join tallybook.lane l on l.queue = q.name and l.retired_at is null
   cross join lateral (select h.*, v_quiet and h.holes = '{}' and h.closed = '{}' and h.hi <= pg_snapshot_xmax(v_snap)
                                   as whole from tallybook._cursor_of(l.lane_id) h) c
   cross join lateral (select case when c.whole then c.pos_xid
                                   else tallybook._next(l.lane_id, l.retention, l.born) end as xid offset 0) n
   cross join lateral (select greatest(e.run_at, e.enqueued_at) as ready_at from tallybook.entry e
                        where e.lane_id = l.lane_id and e.retention = l.retention
                          and (e.xid, e.seq) > (n.xid, case when n.xid = c.pos_xid then c.pos_seq else 0 end)
                        order by e.xid, e.seq limit 1) e
   group by q.name;
end $$;
