-- _amend(job_id, task, on_conflict, args, priority, run_at, ..., at): change a queued job after a conflict of unique
-- keys.
--
-- Returns true if done, or if the job runs: a running job keeps its args, priority and time. False: it moved between
-- two looks, or has ended. A scheduled or waiting job is updated in place. A job in line is not (an entry is never
-- updated): an amendment is written, which the claim reads; for another lane or time promote moves the job after the
-- commit. A start of the job waits for the caller's transaction (see _start_waits).
--   p_queued   the caller holds that lock and has seen the job queued
--   p_version  the version of p_args, as in the options
-- Errors: TB003 at another isolation level than READ COMMITTED, if the job is in line.
-- Reads entry, lane, outcome, claim, tombstone; writes scheduled, waiting, amendment, at first use lane.
-- profile: lookup
create or replace function tallybook._amend(p_job_id bigint, p_task text, p_on_conflict text, p_args jsonb,
  p_priority int, p_run_at timestamptz, p_queued boolean default false, p_version jsonb default null,
  p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
declare
  e record; v_mine boolean := p_queued or exists (
    select from tallybook.amendment a where a.job_id = p_job_id and a.xid = pg_current_xact_id_if_assigned());
begin
  p_args := case when p_on_conflict = 'replace_args' then p_args end;
  p_version := case when p_on_conflict = 'replace_args' then p_version end;
  p_priority := case when p_on_conflict = 'raise_priority' then coalesce(p_priority, 2) end;
  p_run_at := case when p_on_conflict = 'push_run_at' then p_run_at end;
  if not p_queued then
    if not v_mine and not tallybook._job_queued(p_job_id) then
      return tallybook._job_open(p_job_id);  -- do not delay a running job
    end if;
    perform tallybook._start_waits(p_job_id, p_task);
  end if;
  if tallybook._amend_aside(p_job_id, p_args, p_priority, p_run_at, p_version, p_at) then return true; end if;
  select x.lane_id, l.priority, tallybook._cursor_passed(x.lane_id, x.retention, x.xid, x.seq)
           or exists (select from tallybook.tombstone t where t.job_id = x.job_id and t.attempt = x.attempt
                      and t.taken) as taken,
         exists (select from tallybook._outcome_of(x.retention, x.xid, x.seq)) as ended
    into e
    from tallybook.entry x join tallybook.lane l on l.lane_id = x.lane_id
   where x.job_id = p_job_id order by x.attempt desc limit 1;
  if not found or e.ended then return false; end if;
  -- Claimed: it runs, unless this transaction has changed it before; then its start waits for us.
  if e.taken and not v_mine then return true; end if;
  -- A job in line runs at once, unless its time was changed before.
  if p_run_at <= p_at and not exists (select from tallybook.amendment a where a.job_id = p_job_id) then
    return true;
  end if;
  if p_priority >= e.priority then return true; end if;
  perform tallybook._read_committed('on_conflict ' || p_on_conflict || ' needs READ COMMITTED', format(
            'An older snapshot does not show whether job %s has started since.', p_job_id));
  insert into tallybook.amendment as a (job_id, args, priority, run_at, version)
  values (p_job_id, p_args, p_priority, p_run_at, p_version)
  on conflict on constraint amendment_pkey do update
    set args = coalesce(excluded.args, a.args),
        version = case when excluded.args is null then a.version else excluded.version end,
        priority = least(excluded.priority, a.priority), run_at = coalesce(excluded.run_at, a.run_at),
        xid = excluded.xid;
  if p_on_conflict <> 'replace_args' then perform tallybook._wake(' promote'); end if;
  return true;
end $$;

-- _amend_aside(job_id, args, priority, run_at, version, at): _amend of a scheduled or waiting job; a null stays
-- unchanged. False: it is neither.
create or replace function tallybook._amend_aside(p_job_id bigint, p_args jsonb, p_priority int,
  p_run_at timestamptz, p_version jsonb, p_at timestamptz) returns boolean
language plpgsql as $$
declare s record; v_lane int;
begin
  select x.*, l.queue, l.priority, l.part into s
    from tallybook.scheduled x join tallybook.lane l on l.lane_id = x.lane_id where x.job_id = p_job_id for update of x;
  if not found then
    select x.*, l.queue, l.priority, l.part into s
      from tallybook.waiting x join tallybook.lane l on l.lane_id = x.lane_id where x.job_id = p_job_id for update of x;
  end if;
  if not found then return false; end if;
  if p_priority < s.priority then
    select n.lane_id into v_lane from tallybook._lane(s.queue, p_priority, s.part) n;
    perform tallybook._raise_in_lines(p_job_id, p_priority);
  end if;
  if p_args is null and p_run_at is null and v_lane is null then return true; end if;
  if p_args is not null then s.options := tallybook._versioned(s.options, p_version); end if;
  if p_run_at is not null then s.options := tallybook._turn_over(s.options); end if;
  s.args := coalesce(p_args, s.args); s.run_at := coalesce(p_run_at, s.run_at);
  s.lane_id := coalesce(v_lane, s.lane_id);
  update tallybook.scheduled x set args = s.args, run_at = s.run_at, lane_id = s.lane_id, options = s.options
   where x.job_id = p_job_id;
  if found and p_run_at < p_at + interval '10 s' then perform tallybook._wake(' promote'); end if;
  update tallybook.waiting x set args = s.args, run_at = s.run_at, lane_id = s.lane_id, options = s.options
   where x.job_id = p_job_id;
  update tallybook.amendment a
     set args = coalesce(p_args, a.args), version = case when p_args is null then a.version else p_version end,
         run_at = case when p_run_at is null then a.run_at end, xid = default
   where a.job_id = p_job_id and (p_args is not null or p_run_at is not null and a.run_at is not null);
  return true;
end $$;
