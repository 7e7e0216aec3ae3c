-- _schedules_fire(plans, at): carry out what a worker has computed for schedules that were due. Returns how many of
-- them were carried out, and the counts of their ticks.
--
-- plans: [{"name", "revision" and "tick" as read, "late": [ticks], "ticks": [ticks], "missed_from", "missed_ticks",
-- "next", "due", "problem", "now"}]. A plan counts only for the row that it was made from: where that has moved on, was
-- changed or paused, or is locked, nothing is done. The session that inserts the row (schedule, tick) in fire has
-- fired that tick; the same statement enqueues the job. late: missed ticks to fire, in their
-- order and one at a time.
-- now: a person fires it, also while it is paused.
-- Errors: TB003 at another isolation level than READ COMMITTED, because the job of the last fire is looked up after the
-- row was locked, in a newer snapshot. A schedule that cannot be fired is recorded as failed and delays no other.
-- Reads and writes schedule; writes fire, entry, at first use lane; service.
-- profile: nested
-- rights: worker
create or replace function tallybook._schedules_fire(p_plans jsonb, p_at timestamptz default clock_timestamp(),
  out carried int, out fired int, out skipped int, out missed int, out failed int) language plpgsql as $$
declare
  v_names text[]; v_todo jsonb[] := array[p_plans]; r record;  -- all at once; one by one where that fails
begin
  perform tallybook._read_committed('a schedule is fired in READ COMMITTED',
                                    'An older snapshot may overlook the job of its last fire.');
  fired := 0; skipped := 0; missed := 0; failed := 0;
  -- One at a time: a join that was planned while the table was empty may read all of it, for ever.
  v_names := array(
    select l.name
      from (select x.* from jsonb_to_recordset(p_plans) x(name text, revision xid8, tick timestamptz, now boolean)
            order by x.name) p,
           lateral (select s.name from tallybook.schedule s
                     where s.name = p.name and s.revision = p.revision and s.tick is not distinct from p.tick
                       and (s.paused_at is null or p.now)
                     limit 1 for update skip locked) l);
  carried := cardinality(v_names);
  if carried = 0 then return; end if;
  while v_todo <> '{}' loop
    begin
      select * into r from tallybook._schedules_put_in(v_todo[1], v_names, p_at);
      fired := fired + r.fired; skipped := skipped + r.skipped; missed := missed + r.missed;
      v_todo := v_todo[2:];
    exception when others then
      -- A deadlock, a full disk, a migration: not a schedule's fault.
      if sqlstate !~ '^(TB|22|23|P0)' then raise; end if;
      if jsonb_array_length(v_todo[1]) > 1 then
        v_todo := array(select jsonb_build_array(p) from jsonb_array_elements(p_plans) p
                         where p ->> 'name' = any (v_names));
      else
        perform tallybook._schedule_failed(jsonb_populate_record(null::tallybook._plan, v_todo[1] -> 0), sqlerrm, p_at);
        failed := failed + 1; v_todo := v_todo[2:];
      end if;
    end;
  end loop;
  perform tallybook._service_ran('schedules', p_at, fired);
end $$;

-- _schedules_put_in(plans, names, at): the same for rows that the caller has locked.
-- profile: nested
create or replace function tallybook._schedules_put_in(p_plans jsonb, p_names text[], p_at timestamptz,
  out fired int, out skipped int, out missed int) language plpgsql as $$
declare d record;
begin
  fired := 0; skipped := 0; missed := 0;
  for d in
    with s as materialized (
      -- in_line: a schedule that catches up enqueues several jobs at once, which run one after the other.
      select p.*, k.* from jsonb_populate_recordset(null::tallybook._plan, p_plans) p,
             lateral (select s.overlap, not s.overlap and s.missed = 'all' as in_line, s.line,
                             not s.overlap and (tallybook._job_open(s.last_job_id)
                                                or exists (select from unnest(s.line) j
                                                           where tallybook._job_open(j))) as live
                        from tallybook.schedule s where s.name = p.name limit 1) k
       where p.name = any (p_names)
    ), t as (
      select s.name, x.tick, x.late,
             -- Behind open jobs only if they are in the same line: line is null for jobs of an older
             -- definition.
             case when s.overlap or x.late and s.in_line and (s.line is not null or not s.live) then 'enqueued'
                  when s.live or row_number() over (partition by s.name order by x.tick) > 1 then 'skipped'
                  else 'enqueued' end as what
        from s, lateral (select l, true from unnest(s.late) l union all select k, false
                         from unnest(s.ticks) k) x(tick, late)
    ), f as (
      insert into tallybook.fire (schedule, tick, fired_at, what, reason, job_id, jobs)
      select o.name, o.tick, p_at, o.what, case when o.what = 'skipped' then 'overlap' when o.late then 'late' end,
             case when o.what = 'enqueued' then nextval('tallybook.job_id') end,
             case when o.what = 'enqueued' then 1 end
        from (select t.* from t order by t.tick, t.name) o
      on conflict do nothing
      returning fire.schedule, fire.tick, fire.what, fire.job_id
    ), m as (
      insert into tallybook.fire (schedule, tick, fired_at, what, ticks)
      select s.name, s.missed_from, p_at, 'missed', s.missed_ticks from s where s.missed_from is not null
             order by s.name
      on conflict do nothing
      returning fire.schedule, fire.ticks
    ), put as materialized (
      select k.put
        from f, lateral (
          select tallybook._put(f.job_id, s.queue, s.task, s.args, null, s.priority, null, s.max_attempts, s.headers,
                                p_at, case when not s.overlap and s.missed = 'all' then 'schedule:' || s.name end, null,
                                coalesce(s.options, '{}')
                                  - case when not s.overlap and s.missed = 'all' then 'fair_key' else '' end
                                  || jsonb_build_object('schedule', s.name, 'tick', f.tick)) as put
            from tallybook.schedule s where s.name = f.schedule limit 1) k
       where f.what = 'enqueued'
    )
    -- Brought together without a join: there is no index on what a CTE returns.
    select u.name, max(u.next) as next, max(u.due) as due, max(u.problem) as problem, bool_or(u.in_line) as in_line,
           count(*) filter (where u.what = 'enqueued') as fired, count(*) filter (where u.what = 'skipped') as skipped,
           array_agg(u.job_id order by u.job_id) filter (where u.what = 'enqueued') as jobs,
           coalesce(sum(u.ticks), 0) + 0 * (select count(*) from put) as missed
      from (select s.name, s.next, s.due, s.problem, s.in_line, null::text as what, null::bigint as job_id,
            null::int as ticks from s
            union all select f.schedule, null, null, null, null, f.what, f.job_id, null from f
            union all select m.schedule, null, null, null, null, null, null, m.ticks from m) u
     group by u.name order by u.name
  loop
    update tallybook.schedule k
       set tick = d.next, due_at = d.due, problem = d.problem, fired_count = k.fired_count + d.fired,
           skipped_count = k.skipped_count + d.skipped, missed_count = k.missed_count + d.missed,
           last_job_id = coalesce(d.jobs[cardinality(d.jobs)], k.last_job_id),
           line = case when not d.in_line then null when d.jobs is null then k.line
                       else array(select j from unnest(k.line || k.last_job_id || d.jobs[:cardinality(d.jobs) - 1]) j
                                   where j = any (d.jobs) or tallybook._job_open(j)) end
     where k.name = d.name;
    fired := fired + d.fired; skipped := skipped + d.skipped; missed := missed + d.missed;
  end loop;
end $$;

-- _schedule_failed(plan, reason, at): its ticks could not be fired; the schedule continues with the next.
create or replace function tallybook._schedule_failed(p tallybook._plan, p_reason text, p_at timestamptz) returns void
language sql as $$
  with f as (
    insert into tallybook.fire (schedule, tick, fired_at, what, reason)
    select p.name, k, p_at, 'failed', left(p_reason, 2000) from unnest(p.late || p.ticks) k order by k
    on conflict do nothing returning 1
  )
  update tallybook.schedule s
     set tick = p.next, due_at = p.due, failed_count = s.failed_count + (select count(*) from f)
   where s.name = p.name
$$;
