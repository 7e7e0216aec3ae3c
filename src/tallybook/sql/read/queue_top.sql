-- queue_top(queue, states, max_jobs, after): list the next jobs of a queue in the order in which they would run.
--
--   states    available, scheduled, retrying; null: all three
--   max_jobs  page size, at most 1000
--   after     the place of the last row of the previous page
-- Available jobs come first, by priority; within a priority, those whose turn at a limit has come, then the others
-- in the order of the lane. The scheduled jobs follow, by run_at. position counts from 1 over all pages. Cancelled jobs
-- are left out. A paused queue, limits and order keys can change the order. Reads only the rows that it returns: lane,
-- claim, entry, tombstone, scheduled.
-- Errors: TB002 unknown queue, TB005.
-- profile: nested
-- rights: operator
create or replace function tallybook.queue_top(queue text, states text[] default null, max_jobs int default 50,
  after text default null)
returns table ("position" bigint, id bigint, task text, state text, priority int, run_at timestamptz,
  enqueued_at timestamptz, place text) language plpgsql stable as $$
declare
  -- A place has the source, the position, and the key of the row. In line: priority, turn, phase, xid, seq; else:
  -- run_at, job.
  a text[] := string_to_array(after, ' '); v_at bigint := 0; v_left int := max_jobs; v_n int; g record;
begin
  perform tallybook._refuse(not states <@ array['available', 'scheduled', 'retrying'],
            format('unknown states %s', states), 'Use available, scheduled, retrying.');
  perform tallybook._check_range('max_jobs', max_jobs::text, max_jobs between 1 and 1000, 'It must be from 1 to 1000.');
  perform tallybook._refuse(
            after !~ E'^(line \\d+ \\d{1,5} [01] [0-3] \\d{1,19} \\d{1,19}|later \\d+ [-+\\w:.]+ \\d{1,19})$',
            format('%s is not a place', to_json(after)), 'Pass the place of the previous page''s last row.'),
          tallybook._refuse(not exists (select from tallybook.queues q where q.name = queue_top.queue),
            format('there is no queue %s', to_json(queue_top.queue)), 'See the view tallybook.queues.', 'TB002');
  v_at := coalesce(a[2]::bigint, 0);
  if (states is null or 'available' = any (states)) and a[1] is distinct from 'later' then
    for g in select l.priority, (l.part <> 'turn')::int as turn, array_agg(l.lane_id) as lanes from tallybook.lane l
              where l.queue = queue_top.queue and l.retired_at is null
                and (a is null or (l.priority, (l.part <> 'turn')::int) >= (a[3]::int, a[4]::int))
              group by l.priority, (l.part <> 'turn')::int order by l.priority, turn loop
      if a is not null and (g.priority, g.turn) > (a[3]::int, a[4]::int) then a := null; end if;  -- from its start
      return query
      select n.nth, e.job_id, e.task, 'available', g.priority::int, coalesce(e.run_at, e.enqueued_at), e.enqueued_at,
             concat_ws(' ', 'line', n.nth, g.priority, g.turn, n.phase, n.xid, n.seq)
        from (select r.lane_id, r.retention, r.phase, e.xid, e.seq,
                     v_at + row_number() over (order by r.phase, e.xid, e.seq) as nth
                from unnest(g.lanes) x(lane_id), lateral tallybook._line_ranges(x.lane_id) r, lateral (
                  select y.xid, y.seq from tallybook.entry y
                   where y.lane_id = r.lane_id and y.retention = r.retention
                     and y.xid >= greatest(r.from_xid, case when r.phase = a[5]::int then a[6]::xid8 end)
                     and (y.xid, y.seq) > (r.from_xid, r.from_seq)
                     and y.xid <= r.to_xid and (y.xid, y.seq) < (r.to_xid, r.to_seq) and y.xid <> all (r.holes)
                     and (a is null or r.phase > a[5]::int or (y.xid, y.seq) > (a[6]::xid8, a[7]::bigint))
                     and not exists (select from tallybook.tombstone t
                                      where t.job_id = y.job_id and t.attempt = y.attempt and t.taken)
                     and not exists (select from tallybook._cancel_of(y.job_id, y.attempt))
                   order by y.xid, y.seq limit v_left) e
               where a is null or r.phase >= a[5]::int order by nth limit v_left) n
       cross join lateral (select y.job_id, y.task, y.run_at, y.enqueued_at from tallybook.entry y
                            where y.lane_id = n.lane_id and y.retention = n.retention and y.xid = n.xid
                              and y.seq = n.seq limit 1) e
       order by n.nth;
      get diagnostics v_n = row_count;
      v_at := v_at + v_n; v_left := v_left - v_n; a := null;
      if v_left = 0 then return; end if;
    end loop;
  end if;
  if states is null or states && array['scheduled', 'retrying'] then
    if a[1] = 'line' then a := null; end if;
    return query
    select s.nth, s.job_id, s.task, case when s.failures > 0 then 'retrying' else 'scheduled' end, s.priority::int,
           s.run_at, s.enqueued_at,
           concat_ws(' ', 'later', s.nth, to_char(s.run_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                     s.job_id)
      from (select d.*, l.priority, v_at + row_number() over (order by d.run_at, d.job_id) as nth
              from tallybook.lane l cross join lateral (
              select x.job_id, x.task, x.failures, x.run_at, x.enqueued_at from tallybook.scheduled x
               -- ordered by it; otherwise all scheduled rows are read for a few
               where x.lane_id >= l.lane_id and x.lane_id <= l.lane_id
                 and (x.run_at, x.job_id) > (coalesce(a[3]::timestamptz, '-infinity'), coalesce(a[4]::bigint, 0))
                 and (queue_top.states is null or case when x.failures > 0 then 'retrying'
                      else 'scheduled' end = any (queue_top.states))
                 and not exists (select from tallybook._cancel_of(x.job_id, x.attempt))
               order by x.lane_id, x.run_at, x.job_id limit v_left) d
             where l.queue = queue_top.queue order by nth limit v_left) s
     order by s.nth;
  end if;
end $$;
