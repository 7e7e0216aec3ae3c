-- _schedule_fire_query(plan, at): fire one query-driven schedule that is due, in a transaction of its own.
--
-- The plan is that of _schedules_fire. Each tick enqueues the rows of the query. An error of the query is recorded as
-- failed, with its message. carried: whether the plan was executed; false if the schedule has changed since, or
-- another is at it.
-- The schedule's row is not locked while the query runs, only an advisory lock is held (class 1413565449), which
-- everybody only tries: a person can pause or drop a schedule whose query is slow. At the end the row moves on if
-- nobody has changed it meanwhile.
-- The query is run with the caller's rights: this function is never a SECURITY DEFINER, the steps that touch our tables
-- may be.
-- Errors: TB003 at another isolation level than READ COMMITTED; errors that are not the query's fault (a deadlock, a
-- full disk, a shutdown), and a cancelled statement: then nothing is recorded, and the caller calls
-- _schedule_query_failed. Reads and writes schedule, fire; writes what enqueue does.
-- rights: worker, as the caller
create or replace function tallybook._schedule_fire_query(p_plan jsonb, p_at timestamptz default clock_timestamp(),
  out carried boolean, out jobs bigint, out fired int, out failed int, out reason text)
language plpgsql as $$
declare
  p tallybook._plan := jsonb_populate_record(null::tallybook._plan, p_plan);
  v_tick timestamptz; v_jobs bigint; v_missed int;
begin
  perform tallybook._read_committed('a schedule is fired in READ COMMITTED');
  jobs := 0; fired := 0; failed := 0;
  select b.carried, b.missed into carried, v_missed from tallybook._schedule_query_begin(p, p_at) b;
  if not carried then return; end if;
  for v_tick in select k from unnest(p.late || p.ticks) k order by k loop
    continue when not tallybook._schedule_query_tick(p.name, v_tick, v_tick = any (p.late), p_at);
    begin
      select e.created into v_jobs
        from tallybook._schedule_of(p.name) s, lateral tallybook.enqueue_from(s.query, s.queue, s.task, s.priority,
               s.max_attempts, s.headers,
               coalesce(s.options, '{}') || jsonb_build_object('schedule', s.name, 'tick', v_tick), p_at) e;
      perform tallybook._schedule_query_ended(p.name, v_tick, v_jobs, null);
      jobs := jobs + v_jobs; fired := fired + 1;
    exception when others then
      if sqlstate ~ '^(40|53|55|57|58|25|XX)' then raise; end if;
      reason := left(sqlerrm, 2000);
      perform tallybook._schedule_query_ended(p.name, v_tick, null, reason);
      failed := failed + 1;
    end;
  end loop;
  perform tallybook._schedule_query_over(p, fired, failed, v_missed);
end $$;

-- _schedule_query_failed(plan, reason, at): record that a query-driven schedule could not be fired, if that
-- rolled the transaction back: a timeout, a cancelled statement, or repeated contention.
-- False: another worker decides.
-- rights: worker
create or replace function tallybook._schedule_query_failed(p_plan jsonb, p_reason text,
  p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  if not tallybook._schedule_query_ours(p_plan ->> 'name') then return false; end if;
  perform tallybook._schedule_failed(jsonb_populate_record(null::tallybook._plan, p_plan), p_reason, p_at)
     from (select from tallybook.schedule s
            where s.name = p_plan ->> 'name' and s.revision = (p_plan ->> 'revision')::xid8 and s.paused_at is null
              and s.tick is not distinct from (p_plan ->> 'tick')::timestamptz for update skip locked) l;
  return found;
end $$;

-- _schedule_query_ours(name): whether no other session runs this schedule's query; if so, none can until the caller's
-- transaction has ended.
create or replace function tallybook._schedule_query_ours(p_name text) returns boolean
language sql as $$ select pg_try_advisory_xact_lock(1413565449, hashtext('query of ' || p_name)) $$;
