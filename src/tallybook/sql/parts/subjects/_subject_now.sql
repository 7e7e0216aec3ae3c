-- _subject_now(job_id, at): the present state of a subject's job whose end is not recorded. No state: it was
-- cancelled, or there is no trace of it, and the subject is as good as forgotten.
--
--   state     planned (it has a time that is to come, or is due and about to be promoted), pending (in line, or it
--             waits for a permit or its order key), active, completed, dead, killed
--   attempts  how often it was started since it was last rescheduled, as its failures are those since then
--   run_at    when it runs, or was to run; null: it runs, or has ended
-- Uses the snapshot of the caller's statement, so a job that moves between tables is not
-- missed.
-- Reads scheduled, waiting, entry, outcome, claim, tombstone, amendment, dead.
-- profile: nested
-- rights: operator
create or replace function tallybook._subject_now(p_job_id bigint, p_at timestamptz default clock_timestamp(),
  out state text, out queue text, out priority int, out args jsonb, out options jsonb, out failures int,
  out attempts int, out run_at timestamptz, out error jsonb)
language plpgsql stable
set enable_nestloop = on  -- also where the caller has it off
as $$
declare e record; a tallybook.amendment; v_ended text; v_open boolean;
begin
  select x.* into e from tallybook._aside x where x.job_id = p_job_id;
  if found then
    v_open := e.place <> 'dead';
    state := case e.place when 'scheduled' then 'planned' when 'waiting' then 'pending'
                          else case e.reason when 'killed' then 'killed' else 'dead' end end;
  else
    select x.* into e from tallybook._newest_entry(p_job_id) x;
    select o.state::text into v_ended from tallybook._outcome_of(e.retention, e.xid, e.seq) o;
    if e.job_id is null or v_ended <> 'completed' then return; end if;
    v_open := v_ended is null and not tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
          and not exists (select from tallybook.tombstone t where t.job_id = p_job_id and t.attempt = e.attempt
                          and t.taken);
  end if;
  args := e.args; options := e.options; failures := e.failures; error := e.errors -> -1;
  if state is null or v_open then  -- with changes since, also those during its move to scheduled or waiting
    select x.* into a from tallybook.amendment x where x.job_id = p_job_id;
    if a.args is not null then
      args := a.args; options := tallybook._versioned(options, a.version);
    end if;
    if v_open then run_at := coalesce(a.run_at, e.run_at, e.enqueued_at); end if;
    state := coalesce(state, v_ended, case when not v_open then 'active' when a.run_at > p_at then 'planned'
                                           else 'pending' end);
  end if;
  -- Cancelled, and not started: the next claim will record it.
  if v_open and exists (select from tallybook._cancel_of(p_job_id, e.attempt)) then
    state := null;
    return;
  end if;
  select l.queue, coalesce(least(a.priority, l.priority), l.priority) into queue, priority from tallybook.lane l
         where l.lane_id = e.lane_id;
  attempts := tallybook._subject_attempts(p_job_id, e.attempt - v_open::int, options);
end $$;

-- _subject_attempts(job_id, attempt, options): how many attempts up to this one were started since the last reschedule.
-- Read in their order, for which only their index fits (see _attempt).
-- profile: hot
create or replace function tallybook._subject_attempts(p_job_id bigint, p_attempt int, p_options jsonb) returns int
language plpgsql stable
set enable_sort = off  -- the index has them in order: a sort would read all
as $$
declare v_from int := coalesce((p_options #>> '{subject,from}')::int, 0);
begin
  if v_from = 0 then return p_attempt - tallybook._unstarted_attempts(p_job_id, p_attempt + 1); end if;
  return p_attempt - v_from - (
    select count(*) from (
      select from tallybook.entry x left join lateral tallybook._outcome_of(x.retention, x.xid, x.seq) o on true
       where x.job_id = p_job_id and x.attempt > 1 and x.attempt > v_from and x.attempt <= p_attempt
         and (o.state = 'moved' or coalesce(o.state, 'cancelled') = 'cancelled' and not exists (
                select from tallybook._claim_of(x.lane_id, x.retention, x.xid, x.seq)))  -- see _unstarted_attempts
       order by x.attempt) e);
end $$;
