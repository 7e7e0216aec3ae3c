-- limit_take(leases, job_ids, attempts): ask when claimed jobs with limits may start. Call it before you start them.
--
-- Returns for each job that the caller still holds:
--   starts_in  seconds from now: do not start the job earlier, nor more than late seconds later. At most ahead plus
--              0.15 s, or plus 0.4 s for a job that has waited
--   late       20 ms; for long windows a hundredth of the window, and for a distant caller as much as ahead, up to 1 s.
--              After that time, call again with missed
--   unknown    the name of a limit that does not exist; starts_in and late are then null, and the job is unchanged. If
--              all three are null, a limit with skips has cancelled the job
--   permits    the job holds a permit of a concurrency limit: when it has ended, call concurrency_release() with the
--              limits' names
-- A job that is not returned no longer belongs to the caller: it is scheduled until its turn, or waits for a permit, or
-- was lost before. No failure is counted, and the next attempt asks again: an unused turn expires, and there is no
-- catch-up. The other arguments:
--   names     limits to take instead of those of the jobs: keys that only the handler knows
--   ahead     how long the caller needs from the call to the start; no start is sooner than the rate allows
--   missed    true: these jobs did not start when their turns came. They start as soon as possible, and later turns are
--             moved back
--   at        the time; for tests
-- The rules (see rate_limit_set): starts of one key are one gap apart; the gap is the window divided by the calls. A
-- burst of b allows b starts at once, with a longer gap, so that no window has too many calls. From time to time, one
-- gap is longer by the longest late since the last such gap, so that late starts cannot exceed the limit.
-- The order is first come, first served: the run_at of a waiting job is its turn, and a new job goes behind the waiting
-- ones unless its priority is below 2. A job whose turn came but that could not start, because of an outage or a push,
-- stays ahead of new ones. A permit is held until any session has recorded the attempt's outcome, so there are never
-- more permits than the limit allows. Jobs that wait for a permit get it by priority, then by age.
-- Needs READ COMMITTED (TB003). Locks the keys' rows in their order until the end of the transaction: commit at once.
-- Reads claim, entry, outcome, limit_rule; writes rate_state, rate_call,
-- concurrency_holder, breaker_state; for waiting jobs outcome and scheduled, or waiting and concurrency_line, at
-- first use lane.
-- rights: worker
create or replace function tallybook.limit_take(leases uuid[], job_ids bigint[], attempts int[],
  names text[] default null, ahead interval default '0', missed boolean default false,
  at timestamptz default clock_timestamp())
returns table (job_id bigint, starts_in double precision, unknown text, late double precision, permits boolean)
language plpgsql as $$
declare
  c_from constant timestamptz := at + ahead;
  c_soon constant timestamptz := c_from + interval '150 ms';  -- a start this near is waited for
  -- A job whose turn has moved since it came back waits a little longer, which saves another write.
  c_near constant timestamptz := c_from + interval '400 ms';
  v_jobs tallybook._limited_job[]; v_job tallybook._limited_job; v_held tallybook._limited_job[] := '{}';
  v_keys tallybook._limit_key[]; v_names text[]; v_name text; k tallybook._limit_key; v_of int[]; v_late interval;
  e tallybook.entry; c tallybook.rate_call; v_called tallybook.rate_call[] := '{}'; v record; j int;
begin
  perform tallybook._read_committed('limit_take needs READ COMMITTED',
                                    'An older snapshot does not show which jobs were started.');
  v_jobs := array(select x from tallybook._limited_jobs(leases, job_ids, attempts, names) x);
  if v_jobs = '{}' then return; end if;
  v_keys := tallybook._limit_keys(array(select distinct n from unnest(v_jobs) x, unnest(x.limits) n order by n),
                                  (select bool_or(not x.front) from unnest(v_jobs) x), ahead, limit_take.at);
  v_names := array(select x.name from unnest(v_keys) x);
  foreach v_job in array v_jobs loop
    job_id := v_job.job_id; starts_in := null; unknown := null; permits := false; v_of := '{}'; v_late := null;
    foreach v_name in array v_job.limits loop
      k := v_keys[array_position(v_names, v_name)];
      if k.gap is null and k.free is null then unknown := v_name; exit; end if;
      v_of := v_of || array_position(v_names, v_name);
      v_late := least(v_late, k.late);
      permits := permits or k.free is not null;
    end loop;
    late := case when unknown is null then coalesce(extract(epoch from v_late), 3600) end;
    if unknown is not null then permits := false; return next; continue; end if;

    v := tallybook._limit_answer(v_job, v_keys, v_of, c_from,
                                 case when v_job.front and v_job.priority > 1 then c_near else c_soon end,
                                 permits and (v_job.front or missed or names is not null), missed, limit_take.at);
    if v.blocked_by is not null and tallybook._limit_skips(v_job, v.blocked_by, limit_take.at) then
      late := null; permits := false; return next; continue;
    elsif v.blocked_by is not null then
      e := tallybook._end(v_job.lease, v_job.job_id, v_job.attempt, 'moved', null, limit_take.at);
      continue when e.job_id is null;
      e.attempt := e.attempt + 1;
      e.options := coalesce(e.options, '{}') || jsonb_build_object('held', v.blocked_by)
                   || case when e.options -> 'limits' ? v.blocked_by then '{}'::jsonb else
                        jsonb_build_object('permits', coalesce(e.options -> 'permits', '[]') - v.blocked_by
                                           || to_jsonb(v.blocked_by)) end;
      perform tallybook._wait(e, limit_take.at);
      insert into tallybook.concurrency_line (name, priority, seq, job_id)
      values (v.blocked_by, v_job.priority, nextval('tallybook.job_id'), e.job_id);
      continue;
    end if;
    foreach j in array v_of loop
      k := v_keys[j];
      if v.passes and k.free is not null and k.name <> all (v.kept) then
        k.free := k.free - 1;
        insert into tallybook.concurrency_holder (xid, seq, job_id, retention, probe, name)
        values (v_job.xid, v_job.seq, v_job.job_id, v_job.retention, k.probing, k.name);
      end if;
      if v.passes and v.was is null and k.gap is not null then
        c.called_at := v.start_at; c.job_id := v_job.job_id; c.attempt := v_job.attempt; c.name := k.name;
        v_called := v_called || c;
      end if;
      if k.gap is null then  -- no rate: its place is unchanged
      elsif v.was is not null then  -- it has been counted: all jobs after it start later
        k.next_at := k.next_at + (v.start_at - v.was);
      elsif v.passes then
        k.granted := k.granted + 1; k.lag := greatest(k.lag, k.late);
        k.next_at := greatest(k.next_at, v.start_at - (k.burst - 1) * k.gap) + k.gap;
        if k.granted % k.every = 0 then k.next_at := k.next_at + k.lag; k.lag := '0'; end if;
      elsif v_job.front then
        k.front_at := v.start_at + k.step;
      else
        k.tail_at := v.start_at + k.step;
      end if;
      v_keys[j] := k;
    end loop;
    if v.passes then
      starts_in := case when v_late is null then 0 else extract(epoch from v.start_at - limit_take.at) end;
      return next;
    else
      v_job.until := greatest(v.start_at - interval '120 ms', limit_take.at + interval '1 us');  -- see _limit_keys
      v_job.behind := v.behind;
      v_held := v_held || v_job;
    end if;
  end loop;

  update tallybook.rate_state s set next_at = u.next_at, front_at = u.front_at, granted = u.granted, lag = u.lag
    from unnest(v_keys) u
   where s.name = u.name and (s.next_at, s.front_at, s.granted) is distinct from (u.next_at, u.front_at, u.granted);
  insert into tallybook.rate_call (called_at, job_id, attempt, name)
  select u.called_at, u.job_id, u.attempt, u.name from unnest(v_called) u;
  if v_held <> '{}' then perform tallybook._limits_hold(v_held, limit_take.at); end if;
end $$;
