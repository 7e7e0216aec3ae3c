-- limit_take(leases, job_ids, attempts): a start for claimed jobs that limits hold. Ask it before you start one.
--
-- starts_in   seconds from now: start it then, not earlier, and not later by more than late. At most ahead and 0.15 s more
-- late        20 ms; of longer windows the hundredth part, up to 1 s. Whoever comes later asks again, with missed
-- unknown     instead of both: there is no limit of this name; nothing has happened to the job
-- permits      it holds a permit of a concurrency limit: say concurrency_release() with the limits' names when it has ended
-- A job that is not named is not the caller's any more: it stands in scheduled until its turn comes, in waiting until there is a
-- permit, or it was lost before.
-- No failure is counted, and its next attempt asks again: a turn is good at its time only, and what was not used is not saved up.
--   names     what to take instead of the limits that the jobs name: what a handler knows only when it runs
--   ahead     how long the caller needs from asking to starting; no start is sooner
--   missed    these were let through and did not start in time: they start as soon as they can, and all who come after them later
--   at        the time; for tests
-- The rules (see rate_limit_set): starts of one key are a gap apart, the window divided by the calls; a burst of b takes b at
-- once and stretches the gap so that no window has more than its calls. Every so many calls the gap is longer by late, so that
-- starts that come so late cannot make one too many.
-- Who comes first goes first: what waits is in line, with its turn as run_at, and a newcomer goes behind it, unless its priority is
-- below 2. What came back in vain, because of an outage or a push, keeps ahead of newcomers. A permit is held until the attempt has an
-- outcome, whoever writes it, so there are never more than the limit says; who waits for one goes by priority, then as it came.
-- Needs READ COMMITTED (TB003). Locks the keys' rows, in their order, to the end of the transaction: commit at once.
-- Reads claim, entry, outcome, rate_limit, concurrency_limit, breaker_rule; writes rate_state, rate_call, concurrency_holder,
-- breaker_state; for what has to wait outcome and scheduled, or waiting and concurrency_line, at first use lane.
create or replace function tallybook.limit_take(leases uuid[], job_ids bigint[], attempts int[], names text[] default null,
  ahead interval default '0', missed boolean default false, at timestamptz default clock_timestamp())
returns table (job_id bigint, starts_in double precision, unknown text, late double precision, permits boolean)
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_memoize = off
as $$
declare
  c_horizon constant interval := ahead + interval '150 ms';  -- a start that is so near is waited for
  c_early constant interval := '120 ms';  -- what waits in line comes back so long before its turn
  v_lane int[]; v_retention "char"[]; v_xid xid8[]; v_seq bigint[]; v_lease uuid[]; v_job bigint[]; v_attempt int[]; v_limits jsonb[]; v_front boolean[];
  v_priority int[]; v_free int[]; v_probing boolean[]; v_barred boolean[]; v_line boolean[]; v_mine text[]; v_probe text[]; v_blocked text;
  v_special boolean[]; v_name text[]; v_gap interval[]; v_step interval[]; v_late interval[]; v_burst int[]; v_every int[]; v_next timestamptz[];
  v_again timestamptz[]; v_tail timestamptz[]; v_count bigint[];
  v_of int[]; v_start timestamptz; v_was timestamptz; v_last text; v_passes boolean; v_missing text; j int;
  v_called timestamptz[] := '{}'; v_called_job bigint[] := '{}'; v_called_attempt int[] := '{}'; v_called_name text[] := '{}';
  v_lanes int[]; v_turn_lanes int[]; v_known text[]; v_new text[];
  v_rules boolean := exists (select from tallybook.concurrency_limit) or exists (select from tallybook.breaker_rule);
  v_wide boolean := exists (select from tallybook.rate_limit r where r.name like 'queue:%' or r.name like 'task:%')
    or exists (select from tallybook.concurrency_limit r where r.name like 'queue:%' or r.name like 'task:%')
    or exists (select from tallybook.breaker_rule r where r.name like 'queue:%' or r.name like 'task:%');
  v_least interval; v_first timestamptz; v_key text;
  v_held int[] := '{}'; v_held_until timestamptz[] := '{}'; v_held_by text[] := '{}';
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'limit_take needs READ COMMITTED' using errcode = 'TB003', hint = 'An older snapshot does not know who was let through.';
  end if;
  -- 1. What is the caller's, in the order of its lines, and what holds it.
  select array_agg(x.lane_id), array_agg(x.retention), array_agg(x.xid), array_agg(x.seq), array_agg(x.lease), array_agg(x.job_id),
         array_agg(x.attempt), array_agg(x.limits), array_agg(x.front), array_agg(x.special), array_agg(x.priority)
    into v_lane, v_retention, v_xid, v_seq, v_lease, v_job, v_attempt, v_limits, v_front, v_special, v_priority
    from (select k.lane_id, k.retention, k.xid, k.seq, f.lease, k.job_id, k.attempt, e.unique_key is not null as special, l.priority,
                 l.priority < 2 or coalesce(e.options ? 'turn', false) as front,
                 case when limit_take.names is not null then to_jsonb(limit_take.names)
                      else coalesce(e.options -> 'limits', '[]') || case when v_wide then tallybook._wide_limits(l.queue, e.task) else '[]' end end as limits
            from tallybook._lease_entries(leases, job_ids, attempts) k
            join unnest(leases, job_ids, attempts) f(lease, job_id, attempt) on f.job_id = k.job_id and f.attempt = k.attempt
            cross join lateral (
              select e.task, e.options, e.unique_key from tallybook.entry e
               where e.lane_id = k.lane_id and e.retention = k.retention and e.xid = k.xid and e.seq = k.seq limit 1) e
            join tallybook.lane l on l.lane_id = k.lane_id
           where not exists (select from tallybook.outcome o
                              where o.retention = k.retention and o.entry_xid = k.xid and o.entry_seq = k.seq)
           order by front desc, l.priority, k.xid, k.seq) x;
  if v_job is null then return; end if;

  -- 2. Their keys, locked in one order.
  v_name := array(select distinct n from unnest(v_limits) x(l), jsonb_array_elements_text(x.l) n order by n);
  loop
    select array_agg(s.name), array_agg(s.next_at), array_agg(s.front_at), array_agg(s.granted), array_agg(r.per / (r.calls - r.burst + 1)),
           array_agg(r.burst), array_agg(greatest(interval '20 ms', least(r.per / 100, interval '1 s'))), array_agg(r.calls - r.burst + 1),
           array_agg(tallybook._step(r.calls, r.per, r.burst))
      into v_known, v_next, v_again, v_count, v_gap, v_burst, v_late, v_every, v_step
      from (select s.name, s.next_at, s.front_at, s.granted from tallybook.rate_state s
             where s.name = any (v_name) order by s.name for update) s
      left join lateral (
        select r.per, r.calls, r.burst from tallybook.rate_limit r where r.name in (s.name, split_part(s.name, ':', 1))
         order by r.name = s.name desc limit 1) r on true;
    exit when cardinality(v_known) = cardinality(v_name);
    v_new := array(select u.name from unnest(v_name) u(name)
                    where u.name <> all (coalesce(v_known, '{}'))
                      and (exists (select from tallybook._rate_limit_of(u.name))
                           or v_rules and (exists (select from tallybook._concurrency_limit_of(u.name))
                                           or exists (select from tallybook._breaker_of(u.name)))));
    exit when v_new = '{}';
    -- Where another session makes the same row, this waits for its commit, inserts nothing, and the next round reads that row.
    insert into tallybook.rate_state (name, next_at, front_at, granted)
    select n, '-infinity', '-infinity', 0 from unnest(v_new) n order by n on conflict do nothing;
  end loop;
  if cardinality(v_known) is distinct from cardinality(v_name) then  -- some have no rule of any kind
    select array_agg(k.n order by u.name), array_agg(v_next[k.n] order by u.name), array_agg(v_again[k.n] order by u.name),
           array_agg(v_count[k.n] order by u.name), array_agg(v_gap[k.n] order by u.name), array_agg(v_burst[k.n] order by u.name),
           array_agg(v_late[k.n] order by u.name), array_agg(v_every[k.n] order by u.name), array_agg(v_step[k.n] order by u.name)
      into v_of, v_next, v_again, v_count, v_gap, v_burst, v_late, v_every, v_step
      from unnest(v_name) u(name), lateral (select array_position(v_known, u.name) as n) k;
  end if;
  -- Behind whom a newcomer goes, and whether anybody waits; what has waited asks for the latter only.
  if false = any (v_front) or exists (select from unnest(v_again) g where g > '-infinity') then
    select array_agg((select w.run_at + c_early + v_step[u.n] from tallybook.scheduled w
                       where w.options ? 'turn' and w.options ->> 'turn' = u.name
                         and not exists (select from tallybook.tombstone t where t.job_id = w.job_id and t.cancelled)
                       order by w.run_at desc limit 1) order by u.n)
      into v_tail from unnest(v_name) with ordinality u(name, n);
  end if;
  for i in 1..cardinality(v_name) loop
    if v_tail[i] is null then v_again[i] := '-infinity'; end if;  -- nobody waits: who was in front has been cancelled
  end loop;
  if v_rules then
    foreach v_key in array v_name loop
      if exists (select from tallybook.concurrency_line l where l.name = v_key) then perform tallybook._let_in(v_key, limit_take.at, 50); end if;
    end loop;
    -- After all of that: who goes on takes permits of other keys, too.
    select array_agg(x.free order by u.n), array_agg(x.probing order by u.n), array_agg(x.barred order by u.n),
           array_agg(x.free is not null and exists (select from tallybook.concurrency_line l where l.name = u.n) order by u.n)
      into v_free, v_probing, v_barred, v_line from unnest(v_name) u(n), tallybook._permits_free(u.n, limit_take.at) x;
  end if;

  -- 3. One after the other.
  for i in 1..cardinality(v_job) loop
    v_of := '{}'; v_least := null; permits := false;
    for k in 0..jsonb_array_length(v_limits[i]) - 1 loop
      j := array_position(v_name, v_limits[i] ->> k);
      continue when j = any (v_of);
      v_of := v_of || j;
      v_least := least(v_least, case when v_gap[j] is not null then v_late[j] end);
      permits := permits or v_free[j] is not null;
    end loop;
    v_start := limit_take.at + ahead; v_last := null; v_passes := true; v_missing := null; v_blocked := null; v_mine := '{}'; v_probe := '{}';
    if missed then
      v_was := (select max(c.called_at) from tallybook.rate_call c
                 where c.name = (select v_name[n] from unnest(v_of) n where v_gap[n] is not null limit 1) and c.called_at > limit_take.at - interval '1 s'
                   and c.called_at <= limit_take.at + c_horizon  -- else the clock has stepped back since
                   and c.job_id = v_job[i] and c.attempt = v_attempt[i]);
      -- Only while nearly all that counts with it is still to come: see "Any window" in docs/design/0006-outside.md.
      if v_was > limit_take.at - interval '500 ms' then
        v_start := greatest(v_start, v_was);
        foreach j in array v_of loop
          if v_gap[j] is not null then v_next[j] := v_next[j] + (v_start - v_was); end if;
        end loop;
        update tallybook.rate_call c set called_at = v_start
         where c.name = any (array(select v_name[n] from unnest(v_of) n)) and c.called_at = v_was
           and c.job_id = v_job[i] and c.attempt = v_attempt[i];
        job_id := v_job[i]; starts_in := extract(epoch from v_start - limit_take.at); unknown := null;
        late := extract(epoch from v_least);
        return next;
        continue;
      end if;
    end if;
    if permits and (v_front[i] or missed or limit_take.names is not null) then  -- permits that it has, or that were kept for it
      select coalesce(array_agg(h.name), '{}'), coalesce(array_agg(h.name) filter (where h.probe), '{}') into v_mine, v_probe
        from tallybook.concurrency_holder h
       where h.name = any (array(select v_name[n] from unnest(v_of) n)) and h.xid = v_xid[i] and h.seq = v_seq[i];
    end if;
    foreach j in array v_of loop
      if v_gap[j] is null and v_free[j] is null then v_missing := v_name[j]; exit; end if;
      if v_free[j] is not null and v_blocked is null and (case when v_name[j] = any (v_mine) then v_barred[j] and v_name[j] <> all (v_probe)
                                                           else v_free[j] <= 0 or v_line[j] end) then
        v_blocked := v_name[j];
      end if;
      continue when v_gap[j] is null;
      if v_next[j] > v_start then v_start := v_next[j]; v_last := v_name[j]; end if;
      if not v_front[i] and v_tail[j] > limit_take.at + c_horizon then v_passes := false; v_last := coalesce(v_last, v_name[j]); end if;
    end loop;
    if v_missing is not null then
      job_id := v_job[i]; starts_in := null; unknown := v_missing; late := null; permits := false;
      return next;
      continue;
    end if;
    if v_blocked is not null then
      perform tallybook._until_permit(v_lease[i], v_job[i], v_attempt[i], v_blocked, v_priority[i], limit_take.at);
      continue;
    end if;
    if v_passes and v_start <= limit_take.at + c_horizon then
      foreach j in array v_of loop
        if v_free[j] is not null and v_name[j] <> all (v_mine) then
          v_free[j] := v_free[j] - 1;
          insert into tallybook.concurrency_holder (xid, seq, job_id, retention, probe, name)
          values (v_xid[i], v_seq[i], v_job[i], v_retention[i], v_probing[j], v_name[j]);
        end if;
        continue when v_gap[j] is null;
        v_count[j] := v_count[j] + 1;
        v_next[j] := greatest(v_next[j], v_start - (v_burst[j] - 1) * v_gap[j]) + v_gap[j]
                     + case when v_count[j] % v_every[j] = 0 then v_late[j] else interval '0' end;
        v_called := v_called || v_start; v_called_name := v_called_name || v_name[j];
        v_called_job := v_called_job || v_job[i]; v_called_attempt := v_called_attempt || v_attempt[i];
      end loop;
      job_id := v_job[i]; starts_in := extract(epoch from v_start - limit_take.at); unknown := null;
      late := coalesce(extract(epoch from v_least), 3600);
      return next;
      continue;
    end if;
    -- Its turn: behind those who wait, at each of its limits.
    foreach j in array v_of loop
      continue when v_gap[j] is null;
      v_start := greatest(v_start, v_again[j], case when not v_front[i] then v_tail[j] end);
    end loop;
    foreach j in array v_of loop
      continue when v_gap[j] is null;
      if v_front[i] then v_again[j] := v_start + v_step[j]; else v_tail[j] := v_start + v_step[j]; end if;
    end loop;
    v_start := greatest(v_start - c_early, limit_take.at + interval '1 us');
    if v_special[i] then
      perform tallybook._until_turn(v_lease[i], v_job[i], v_attempt[i], v_last, v_start, limit_take.at);
    else
      v_held := v_held || i; v_held_until := v_held_until || v_start; v_held_by := v_held_by || v_last;
    end if;
  end loop;

  -- 4. On record, once for all of them.
  update tallybook.rate_state s set next_at = u.next_at, front_at = u.again, granted = u.granted
    from unnest(v_name, v_next, v_again, v_count) u(name, next_at, again, granted)
   where s.name = u.name and (s.next_at, s.front_at, s.granted) is distinct from (u.next_at, u.again, u.granted);
  insert into tallybook.rate_call (called_at, job_id, attempt, name)
  select u.called_at, u.job_id, u.attempt, u.name from unnest(v_called, v_called_job, v_called_attempt, v_called_name) u(called_at, job_id, attempt, name);
  if v_held <> '{}' then
    -- They come back in a lane of their own: behind all others they would be late for their turn.
    select array_agg(l.lane_id), array_agg(tallybook._lane_beside(l.lane_id, 'turn')) into v_lanes, v_turn_lanes
      from tallybook.lane l where l.lane_id = any (array(select distinct v_lane[i] from unnest(v_held) i)) and l.part in ('', 'fair');
    -- Who promotes is told of the first only: before that it looks by itself.
    v_first := (select min(u) from unnest(v_held_until) u);
    if exists (select from tallybook.scheduled s where s.run_at <= v_first and s.run_at > limit_take.at - interval '1 s') then v_first := null; end if;
    with h as materialized (
      select v_lane[u.i] as lane_id, v_retention[u.i] as retention, v_xid[u.i] as xid, v_seq[u.i] as seq, v_job[u.i] as job_id, u.until, u.name
        from unnest(v_held, v_held_until, v_held_by) u(i, until, name)
    ), ended as (
      insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state)
      select h.xid, h.seq, h.job_id, limit_take.at, h.retention, 'snoozed' from h order by h.job_id
      on conflict do nothing returning entry_xid, entry_seq
    ), gone as materialized (
      select e.*, h.until, h.name
        from ended d join h on h.xid = d.entry_xid and h.seq = d.entry_seq
        cross join lateral (select e.* from tallybook.entry e
                             where e.lane_id = h.lane_id and e.retention = h.retention and e.xid = h.xid and e.seq = h.seq limit 1) e
    ), told as (
      insert into tallybook.tally (lane_id, n, attempts, what, task)
      select g.lane_id, count(*), sum(g.attempt), 'snoozed', g.task from gone g group by g.lane_id, g.task)
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, task, args,
                                     headers, unique_key, errors, expires_at, order_key, options)
    select e.job_id, e.until, e.enqueued_at, coalesce(t.turn_lane, e.lane_id), e.attempt + 1, e.failures, e.crashes, e.max_attempts, e.task, e.args,
           e.headers, e.unique_key, e.errors, e.expires_at, e.order_key, coalesce(e.options, '{}') || jsonb_build_object('turn', e.name)
      from gone e left join unnest(v_lanes, v_turn_lanes) t(lane_id, turn_lane) on t.lane_id = e.lane_id;
    if v_first < limit_take.at + interval '10 s' then perform tallybook._wake(' promote'); end if;
  end if;
end $$;

-- _wide_limits(queue, task): the names of the rules for all jobs of a queue and of a task, as a JSON array.
create or replace function tallybook._wide_limits(p_queue text, p_task text) returns jsonb
language plpgsql stable as $$
begin
  return coalesce((select jsonb_agg(distinct r.name) from (
                     select r.name from tallybook.rate_limit r where r.name in ('queue:' || p_queue, 'task:' || p_task)
                     union all
                     select r.name from tallybook.concurrency_limit r where r.name in ('queue:' || p_queue, 'task:' || p_task)
                     union all
                     select r.name from tallybook.breaker_rule r where r.name in ('queue:' || p_queue, 'task:' || p_task)) r), '[]');
end $$;

-- _rate_limit_of(name): the rule of a key: of its own name, else of what stands before the first colon. No row: none.
create or replace function tallybook._rate_limit_of(p_name text) returns setof tallybook.rate_limit
language plpgsql stable as $$
begin
  return query select r.* from tallybook.rate_limit r where r.name = p_name;
  if not found then return query select r.* from tallybook.rate_limit r where r.name = split_part(p_name, ':', 1); end if;
end $$;

-- _until_turn(lease, job_id, attempt, name, run_at, at): end one attempt as snoozed, whose job may have been changed in the
-- meantime (it has a unique key); it stands in scheduled until its turn.
create or replace function tallybook._until_turn(p_lease uuid, p_job_id bigint, p_attempt int, p_name text, p_run_at timestamptz,
  p_at timestamptz) returns void
language plpgsql
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  e tallybook.entry := tallybook._end(p_lease, p_job_id, p_attempt, 'snoozed', null, p_at);
begin
  if e.job_id is null then return; end if;
  e.options := coalesce(e.options, '{}') || jsonb_build_object('turn', p_name);
  perform tallybook._again(e, p_run_at, p_at);
end $$;

-- _step(calls, per, burst): the estimated time between the turns of two that wait. The longer gaps that come now and then are spread over all
-- where they are short beside the time that one comes early: else those far behind come too early by all of them, in vain.
create or replace function tallybook._step(p_calls int, p_per interval, p_burst int) returns interval
language sql immutable as $$
  select p_per / (p_calls - p_burst + 1)
         + case when p_per <= interval '10 s' then greatest(interval '20 ms', p_per / 100) / (p_calls - p_burst + 1) else interval '0' end
$$;
