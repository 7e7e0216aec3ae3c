-- services_due(services, after, worker, queues, at): find out which services have work to do, in one statement that
-- writes nothing.
--
--   services  only these services; null: all
--   after     as for promote: the scheduled jobs before it are known. If promote is among services, pass null.
--   worker, queues  also check whether this worker could claim a job of these queues, which replaces a claim that finds
--                   nothing
-- Returns due: the services that have something to do or have not run for a minute; next_run_at: when the next job is
-- due, and passed: a value for a later call's after, because nothing is scheduled before it; next_tick_at: when the
-- next schedule is due; work: whether there is a job to claim; workers: the number of recorded workers; names and
-- every: the interval of each service. A run itself is promote, rescue, rebase, parents_resolve, fair_release or fold
-- with as_service.
-- Reads service, scheduled, schedule, worker, waiting, parent, tombstone, amendment, lane, queue, claim, entry,
-- installation, fold, tally.
-- profile: hot
-- rights: worker
create or replace function tallybook.services_due(services text[] default null, after timestamptz default null,
  worker int default null, queues text[] default '{}', at timestamptz default clock_timestamp(), out due text[],
  out next_run_at timestamptz, out passed timestamptz, out work boolean, out workers int, out names text[],
  out every interval[], out next_tick_at timestamptz) language plpgsql as $$
declare
  v_old text[]; v_second text[]; v_parts text[]; v_waiting boolean := exists (select from tallybook.waiting w
      where w.order_key is not null);
begin
  select array_agg(s.name), array_agg(s.every), coalesce(array_agg(s.name) filter (where s.last_run_at is null
                                            or s.last_run_at < at - greatest(s.every, interval '1 min')), '{}'),
         coalesce(array_agg(s.name) filter (where s.last_run_at is null or s.last_run_at < at - s.every), '{}'),
         coalesce(array_agg(s.name) filter (where s.last_run_at is null
                                            or s.last_run_at < at - least(s.every, interval '1 s')), '{}')
    into names, every, due, v_old, v_second
    from (select k.name, k.every, k.last_run_at from tallybook.service k order by k.name) s;
  services := coalesce(services, names);
  -- The clock has stepped, or no worker was live.
  if (select max(s.last_run_at) from tallybook.service s)
     not between at - interval '2 min' and at + interval '10 s' then
    services := names; due := names; v_old := names; v_second := names;
  end if;
  if services_due.after > at + interval '10 s' then services_due.after := null; end if;  -- a mark from before the step

  select s.run_at into next_run_at from tallybook.scheduled s
   where s.run_at >= coalesce(services_due.after, '-infinity') order by s.run_at limit 1;
  -- One second of slack. A later commit behind it is found by the next look with after null.
  passed := least(next_run_at, at - interval '1 s');
  due := due || case when next_run_at <= at or after is null and (
    exists (select from tallybook.amendment)
    or v_waiting and exists (select from tallybook.tombstone t where t.cancelled)) then 'promote' end;

  select count(*) into workers from tallybook.worker w where w.ended_at is null;
  due := due || case when exists (
         select from tallybook.worker w where w.ended_at is null
            and (w.gone_at is not null or w.seen_at < at - w.lease
                 or case when w.session then tallybook._session_gone(w.id) else false end))
    or v_waiting and 'rescue' = any (v_second)
    or 'rescue' = any (v_old) and (
       exists (select from tallybook.amendment)
       or exists (select from tallybook.tombstone t where t.created_at < at - interval '1 min')) then 'rescue' end;
  due := due || case when 'parents_resolve' = any (v_second) and exists (select from tallybook.parent)
                     then 'parents_resolve' end;
  due := due || case when 'concurrency_release' = any (v_second) and exists (select from tallybook.concurrency_line)
                     then 'concurrency_release' end;

  -- Only the newest 10,000 numbers, because all of waiting may be dead rows. Workers that run fair_release know older
  -- ones; each worker looks for them at its start and every minute.
  due := due || case when 'fair_release' = any (v_second) and exists (
       select from tallybook.lane l where l.part = 'fair' and exists (
         select from tallybook.waiting w where w.lane_id = l.lane_id and w.fair_key is not null
            and w.fair_seq > (select q.last_value - 10000 from tallybook.job_id q))) then 'fair_release' end;
  due := due || case when tallybook._is_foreign_cluster(false) or 'rebase' = any (v_old)
    and exists (select from tallybook.lane l where l.retired_at is not null) then 'rebase' end;
  if 'schedules' = any (services) then
    next_tick_at := least((select s.due_at from tallybook.schedule s where s.due_at is not null and s.query is null
                           order by s.due_at limit 1),
                          (select s.due_at from tallybook.schedule s where s.due_at is not null and s.query is not null
                           order by s.due_at limit 1));
    due := due || case when next_tick_at <= at then 'schedules' end;
  end if;

  due := due || case when 'fold' = any (v_second) and exists (
    select from (select f.hi, f.holes, f.last_job from tallybook.fold f order by f.number desc limit 1) f
     where f.last_job <> (select q.last_value from tallybook.job_id q)
        or exists (select from tallybook.tally t where t.xid >= f.hi)
        or exists (select from unnest(f.holes) x where pg_visible_in_snapshot(x, pg_current_snapshot())))
    then 'fold' end;
  due := array(select distinct d from unnest(due) d where d = any (services) order by d);
  work := false;
  if queues <> '{}' then
    select w.parts into v_parts from tallybook.worker w where w.id = services_due.worker and w.ended_at is null;
    begin
      -- A worker that was given up, or a cursor of another cluster: the claim handles both.
      work := v_parts is null or (
        tallybook._first_lane(queues, array_fill(1, array[cardinality(queues)]), v_parts, '{}')).lane_id is not null;
    exception when sqlstate 'TB004' then
      work := true;
    end;
  end if;
end $$;
