-- _why_behind(place): how many jobs are before a job in line, and whether no worker can claim from its line. A part of
-- why.
--
-- Counts from the lane's cursor on, in the order of claims (see _take): former holes, then the window, then the rest.
-- Cancelled jobs count as well. Reads lane, claim, entry, installation.
create or replace function tallybook._why_behind(w tallybook._job_place) returns setof tallybook._reason
language plpgsql stable as $$
declare c record; l record; v_phase int; v_own bigint; v_lower bigint := 0;
begin
  if w.retired or tallybook._is_foreign_cluster(false) then
    return query
    select 'not_rebased', 'The database has moved to another cluster, and this job has not been moved yet. A worker '
                          'does that when it starts, and every few seconds.', '{}'::jsonb;
    return;
  end if;
  if w.xid = pg_current_xact_id_if_assigned() then
    return query
    select 'uncommitted', 'This transaction has enqueued it and has not committed.', '{}'::jsonb;
    return;
  end if;
  select * into c from tallybook._cursor_of(w.lane_id);
  v_phase := case when w.xid = any (c.closed) then 0 when w.xid = any (c.holes) then 2
                  when w.xid >= c.hi and c.holes <> '{}' then 3 else 1 end;
  v_own := (select count(*) from (
    select from (  -- each range, or the part of it before the job
      select r.*, case when p.ours then w.xid else r.to_xid end as end_xid,
             case when p.ours then w.seq else r.to_seq end as end_seq
        from tallybook._line_ranges(w.lane_id) r,
             lateral (select r.phase = v_phase and (w.xid, w.seq) < (r.to_xid, r.to_seq) as ours) p
       where r.phase <= v_phase) r, lateral (
      select from tallybook.entry e
       where e.lane_id = r.lane_id and e.retention = r.retention
         and e.xid >= r.from_xid and (e.xid, e.seq) > (r.from_xid, r.from_seq)
         and e.xid <= r.end_xid and (e.xid, e.seq) < (r.end_xid, r.end_seq) and e.xid <> all (r.holes)
       order by e.xid, e.seq limit 10000) e limit 10000) n);
  if w.xid = any (c.holes) then
    return query
    select 'late_commit', format('Its transaction committed after later jobs were claimed. It is claimed with the next '
                                 'part of its lane, after %s.', tallybook._others(v_own)),
           jsonb_build_object('transaction', w.xid::text, 'before', v_own);
    return;
  end if;
  for l in select x.lane_id from tallybook.lane x
            where x.queue = w.queue and x.priority < w.priority and x.part in ('', 'turn', 'fair')
                  and x.retired_at is null
            order by x.priority, x.lane_id limit 50 loop
    exit when v_lower >= 10000;
    v_lower := v_lower + tallybook._in_line(l.lane_id, 10000 - v_lower::int);
  end loop;
  return query
  select 'behind', format('It is behind %s in its lane%s.', tallybook._others(v_own),
           case when v_lower > 0 then format(', and behind %s in its queue with a lower priority number than its %s',
                                             tallybook._others(v_lower), w.priority) end),
         tallybook._counted_before(v_own) || jsonb_build_object('of_lower_priority', v_lower, 'priority', w.priority)
           || case when v_lower >= 10000 then '{"more": true}' else '{}'::jsonb end
   where v_own + v_lower > 0;
end $$;
