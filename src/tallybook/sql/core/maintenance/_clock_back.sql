-- _clock_back(at): mend what lies ahead of the server's clock after it has stepped back. Called by each _service_claim.
--
-- The last run of a service never lies ahead of the clock, unless the clock has stepped back since. The newest run or
-- heartbeat on record gives the size of the step, up to a few seconds short. What was put off before the step by some
-- time then happens after that time:
--   services    all of them are due
--   workers     each one counts as heard now: a dead one is noticed anew, and one that lives keeps its jobs
--   limits      turns, breakers and the jobs that wait for them keep their order and their gaps
--   jobs        the delay after an attempt: backoff, snooze, the next iteration of a subject. A producer's run_at
--               stays, and so does the time of a job that another session has locked
--   schedules   those that tick more often than the step is long tick again from now on, and forget their ticks ahead;
--               the others wait for their next tick, so that none is fired twice
-- A step of up to 10 s is left alone: everything is late by that much, once.
-- Reads outcome, entry; writes rate_state, breaker_state, scheduled, schedule, fire, series_step, worker, service,
-- clock_step.
create or replace function tallybook._clock_back(p_at timestamptz) returns void
language plpgsql
-- profile: nojit
as $$
declare
  v_by interval; v_ticking text[];
begin
  if not exists (select from tallybook.service s where s.last_run_at > p_at + interval '10 s')
     or not pg_try_advisory_xact_lock(1413565449, hashtext('clock: one at a time')) then
    return;
  end if;
  -- Read again behind the lock: another session may have mended it meanwhile.
  select max(s.last_run_at) - p_at into v_by from tallybook.service s;
  if v_by <= interval '10 s' then return; end if;
  v_by := greatest(v_by, (select max(w.seen_at) - p_at from tallybook.worker w
                           where w.ended_at is null and isfinite(w.seen_at)));

  perform from (select s.name from tallybook.rate_state s order by s.name for update) s;
  update tallybook.rate_state s
     set next_at = case when s.next_at > p_at then s.next_at - v_by else s.next_at end,
         front_at = case when s.front_at > p_at then s.front_at - v_by else s.front_at end,
         pushed_to = case when s.pushed_to > p_at then s.pushed_to - v_by else s.pushed_to end,
         promised_at = case when s.promised_at > p_at then s.promised_at - v_by else s.promised_at end,
         paced_to = case when s.paced_to > p_at then s.paced_to - v_by else s.paced_to end
   where greatest(s.next_at, s.front_at, s.pushed_to, s.promised_at, s.paced_to) > p_at;
  update tallybook.breaker_state b
     set failed_at = array(select case when f.at > p_at then f.at - v_by else f.at end
                             from unnest(b.failed_at) with ordinality f(at, n) order by f.n),
         changed_at = least(b.changed_at, p_at),
         open_until = case when b.open_until > p_at then b.open_until - v_by else b.open_until end
   where greatest(b.changed_at, b.open_until) > p_at;
  update tallybook.scheduled s set run_at = s.run_at - v_by
   where s.job_id = any (array(
     select x.job_id from tallybook.scheduled x
      where x.run_at > p_at and isfinite(x.run_at) and x.attempt > 1
        and (x.options ? 'turn'
             or exists (select from tallybook.entry e join tallybook.outcome o
                                 on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq
                         where e.job_id = x.job_id and e.attempt = x.attempt - 1 and o.ended_at > p_at))
        for update of x skip locked));

  v_ticking := array(
    select k.name from tallybook.schedule k,
           lateral (select coalesce(max(f.tick), k.since) as tick from tallybook.fire f where f.schedule = k.name) l
     where k.due_at > p_at and (k.tick is null or l.tick > p_at and k.tick - l.tick <= l.tick - p_at)
     order by k.name for update of k);
  delete from tallybook.fire f where f.schedule = any (v_ticking) and f.tick > p_at;
  update tallybook.schedule k set since = p_at, tick = null, due_at = p_at where k.name = any (v_ticking);
  update tallybook.series_step s set thinned_to = p_at where s.thinned_to > p_at and isfinite(s.thinned_to);

  insert into tallybook.clock_step (noticed_at, by) values (p_at, -v_by);
  -- Last: a heartbeat waits for its row.
  update tallybook.worker w set seen_at = least(w.seen_at, p_at), gone_at = null
   where w.id = any (array(select x.id from tallybook.worker x
                            where x.ended_at is null and isfinite(x.seen_at)
                              and (x.seen_at > p_at or x.gone_at is not null)
                            order by x.id for update skip locked));
  update tallybook.service s set last_run_at = null where s.last_run_at > p_at;
  perform tallybook._wake(' promote');
end $$;
