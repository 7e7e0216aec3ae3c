-- _clock_back(at): repair times that are ahead of the server's clock after it has stepped back. Called by each
-- _service_claim.
--
-- The last run of a service is never ahead of the clock, unless the clock has stepped back since. The newest stored run
-- or heartbeat gives the size of the step, up to a few seconds short. Whatever was put off before the step by some time
-- then happens after that time:
--   services    all of them are due
--   workers     each one counts as heard now: a dead one is noticed anew, and a living one keeps its jobs
--   limits      turns, breakers and the jobs that wait for them keep their order and their gaps
--   jobs        the delay after an attempt: backoff, snooze, the next iteration of a subject. A producer's run_at
--               stays, and so does the time of a job that another session has locked
--   schedules   those that tick more often than the step is long tick again from now on, and forget their ticks ahead;
--               the others wait for their next tick, so that none is fired twice
-- A step of up to 10 s is left alone: everything is late by that much, once.
-- Each part repairs its own tables. Reads outcome, entry; writes scheduled, worker, service, clock_step.
-- profile: nojit
create or replace function tallybook._clock_back(p_at timestamptz) returns void language plpgsql as $$
declare v_by interval;
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

  perform tallybook._limits_clock_back(v_by, p_at);
  update tallybook.scheduled s set run_at = s.run_at - v_by
   where s.job_id = any (array(
     select x.job_id from tallybook.scheduled x
      where x.run_at > p_at and isfinite(x.run_at) and x.attempt > 1
        and (x.options ->> 'turn' <> ''
             or exists (select from tallybook.entry e join tallybook.outcome o
                                 on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq
                         where e.job_id = x.job_id and e.attempt = x.attempt - 1 and o.ended_at > p_at))
        for update of x skip locked));

  perform tallybook._schedules_clock_back(p_at), tallybook._series_clock_back(p_at);
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
