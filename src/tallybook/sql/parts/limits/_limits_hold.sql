-- _limits_hold(jobs, at): end these attempts as snoozed; their jobs are scheduled until their turn at a limit.
--
-- They come back in a lane of their own, because behind all others they would be late for their turn. Jobs with a
-- unique key may have been changed meanwhile: they are ended one by one.
-- Promote is woken for the first only; before that it looks at its interval.
-- Reads entry, lane, amendment; writes outcome, tally, scheduled, amendment, at first use lane.
-- profile: nested
create or replace function tallybook._limits_hold(p_jobs tallybook._limited_job[], p_at timestamptz) returns void
language plpgsql
set enable_memoize = off  -- each row is looked up once: there is nothing to remember
as $$
declare v_lanes int[]; v_turn_lanes int[]; v_first timestamptz; v_job tallybook._limited_job; v_entry tallybook.entry;
begin
  for v_job in select x.* from unnest(p_jobs) x where x.special loop
    v_entry := tallybook._end(v_job.lease, v_job.job_id, v_job.attempt, 'snoozed', null, p_at);
    continue when v_entry.job_id is null;
    v_entry.options := coalesce(v_entry.options, '{}') || jsonb_build_object('turn', v_job.behind);
    v_entry.lane_id := coalesce((select tallybook._lane_beside(l.lane_id, 'turn') from tallybook.lane l
                                  where l.lane_id = v_entry.lane_id and l.part in ('', 'fair')), v_entry.lane_id);
    v_entry.attempt := v_entry.attempt + 1; v_entry.seq := null; v_entry.run_at := p_at;
    perform tallybook._place(v_entry, v_job.until, p_at);
  end loop;
  p_jobs := array(select x from unnest(p_jobs) x where not x.special);
  if p_jobs = '{}' then return; end if;
  select array_agg(l.lane_id), array_agg(tallybook._lane_beside(l.lane_id, 'turn')) into v_lanes, v_turn_lanes
    from tallybook.lane l where l.lane_id = any (array(select x.lane_id from unnest(p_jobs) x))
         and l.part in ('', 'fair');
  select min(x.until) into v_first from unnest(p_jobs) x
  having not exists (select from tallybook.scheduled s
                      where s.run_at <= min(x.until) and s.run_at > p_at - interval '1 s');
  with ended as (
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state)
    select h.xid, h.seq, h.job_id, p_at, h.retention, 'snoozed' from unnest(p_jobs) h order by h.job_id
    on conflict do nothing returning entry_xid, entry_seq
  ), gone as materialized (
    select e.*, h.until, h.behind
      from ended d join unnest(p_jobs) h on h.xid = d.entry_xid and h.seq = d.entry_seq
      cross join lateral (select e.* from tallybook.entry e
                           where e.lane_id = h.lane_id and e.retention = h.retention and e.xid = h.xid and e.seq = h.seq
                                 limit 1) e
  ), told as (
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    select g.lane_id, count(*), sum(g.attempt), 'snoozed', g.task from gone g group by g.lane_id, g.task)
  insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, task,
                                   args, headers, unique_key, errors, expires_at, order_key, options)
  select e.job_id, e.until, e.enqueued_at, coalesce(t.turn_lane, e.lane_id), e.attempt + 1, e.failures, e.crashes,
         e.max_attempts, e.task, e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key,
         coalesce(e.options, '{}') || jsonb_build_object('turn', e.behind)
    from gone e left join unnest(v_lanes, v_turn_lanes) t(lane_id, turn_lane) on t.lane_id = e.lane_id;
  if v_first < p_at + interval '10 s' then perform tallybook._wake(' promote'); end if;
end $$;
