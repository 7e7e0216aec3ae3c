-- schedule_set(name, task, ...): create or change a schedule in the database. Returns created, changed or unchanged.
--
--   cron, every   a cron expression (5 fields, or 6 with seconds), or an interval of 1 s to 366 days; pass one of them
--   tz            the time zone of the cron expression, from the IANA database. Intervals tick at multiples of their
--                 length since 1970 (UTC)
--   args, queue, priority, max_attempts, headers, options   for its jobs, as in enqueue
--   query         enqueue a job for each row of this query, which workers run with their rights: see enqueue_from. Do
--                 not pass args then
--   jitter        fire each tick late by at most this time. Each tick has its own fixed delay, and never fires after
--                 the next tick
--   missed        which ticks to fire if they are found more than 60 s late: once (default; only the latest), skip
--                 (none), or all (up to catch_up, 1 to 1000)
--   overlap       true: fire a tick even if the job of the last one is open
-- It replaces the whole schedule: arguments that are not passed get their defaults.
-- A changed cron, every, tz or query applies from now on; all else changes in place, and a pause stays. Workers compute
-- the ticks; if they cannot, schedule.problem has the reason.
-- If roles are in use, an operator cannot set a query (42501), because it would run with the workers' rights.
-- Errors: TB005 invalid value, or a name that is declared in code. Reads and writes schedule.
-- rights: operator, as the caller
create or replace function tallybook.schedule_set(name text, task text, args jsonb default '{}', cron text default null,
  every interval default null, tz text default 'UTC', queue text default 'default', priority int default 2,
  max_attempts int default null, jitter interval default '0', missed text default 'once', catch_up int default 100,
  overlap boolean default false, headers jsonb default null, options jsonb default null, query text default null,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare s tallybook.schedule; v_what text;
begin
  s.name := schedule_set.name; s.source := 'database'; s.task := schedule_set.task;
  s.args := coalesce(schedule_set.args, '{}'); s.cron := schedule_set.cron; s.every := schedule_set.every;
  s.tz := coalesce(schedule_set.tz, 'UTC'); s.queue := coalesce(schedule_set.queue, 'default');
  s.priority := coalesce(schedule_set.priority, 2); s.max_attempts := schedule_set.max_attempts;
  s.jitter := coalesce(schedule_set.jitter, '0'); s.missed := coalesce(schedule_set.missed, 'once');
  s.catch_up := coalesce(schedule_set.catch_up, 100); s.overlap := coalesce(schedule_set.overlap, false);
  s.headers := schedule_set.headers; s.options := schedule_set.options; s.query := schedule_set.query;
  if s.query is null then return tallybook._schedule_set_plain(s, at); end if;
  v_what := tallybook._schedule_set(s, at, true);
  if v_what <> 'unchanged' then
    begin
      perform tallybook._query_read(s.query);
    exception when insufficient_privilege then null;  -- the workers' rights apply
    end;
  end if;
  return v_what;
end $$;

-- _schedule_set_plain(schedule, at): the same without a query, for operators: a query would
-- run with the workers' rights, and be checked with the owner's.
-- rights: operator
create or replace function tallybook._schedule_set_plain(p tallybook.schedule, p_at timestamptz) returns text
language plpgsql as $$
begin
  p.source := 'database'; p.app := null; p.query := null;
  return tallybook._schedule_set(p, p_at, true);
end $$;

-- _schedule_set(schedule, at, wait): store one definition, for schedule_set and the registration of an app's
-- schedules.
--
-- Without wait it can also return taken: the name belongs to another app, or to the other source (with wait TB005); and
-- busy: another open transaction has locked the row.
-- Errors: TB005 a definition that no job could be made of, or that cannot tick.
create or replace function tallybook._schedule_set(p tallybook.schedule, p_at timestamptz, p_wait boolean) returns text
language plpgsql as $$
declare s tallybook.schedule; v_moved boolean;
begin
  perform tallybook._check_name('schedule name', p.name, 200), tallybook._check_name('task name', p.task, 200),
          tallybook._check_name('queue', p.queue, 64), tallybook._check_args(p.args, p.headers),
          tallybook._check_options(null, null, p.options);
  perform tallybook._refuse(octet_length(p.options::text) > 7500, 'options of a schedule can have at most 7,500 bytes');
  perform tallybook._refuse(p.query is not null and p.args <> '{}', 'a query-driven schedule has no args of its own',
                            'Select a column args in the query.');
  perform tallybook._refuse(p.priority not between 0 and 32767, format('priority %s is out of range', p.priority),
                            'It must be from 0 to 32767. Lower runs first, 2 is the default.');
  perform tallybook._refuse(p.max_attempts not between 1 and 32767,
                            format('max_attempts %s is out of range', p.max_attempts), 'It must be from 1 to 32767.');
  perform tallybook._refuse(num_nonnulls(p.cron, p.every) <> 1, 'a schedule needs a cron expression or an interval',
                            'Pass one of cron and every.');
  perform tallybook._refuse(length(p.cron) > 200 or p.cron !~ E'^\\s*(@\\w+|(\\S+\\s+){4,5}\\S+)\\s*$',
    format('a cron expression must have 5 fields, or 6 with seconds: %s', to_json(left(p.cron, 200))),
    'Write */5 * * * * or @daily; pass an interval as every.');
  perform tallybook._refuse(p.every not between interval '1 s' and interval '366 days'
                            or extract(year from p.every) <> 0 or extract(month from p.every) <> 0,
    format('every %s is out of range', p.every),
    'It must be from 1 s to 366 days. Months and years have no fixed length: use a cron expression.');
  perform tallybook._refuse(p.jitter not between interval '0' and interval '1 day',
                            format('jitter %s is out of range', p.jitter), 'It must be from 0 to 1 day.');
  perform tallybook._refuse(p.missed not in ('once', 'skip', 'all'),
                            format('missed %s is not one of once, skip, all', to_json(p.missed)));
  perform tallybook._refuse(p.catch_up not between 1 and 1000, format('catch_up %s is out of range', p.catch_up),
                            'From 1 to 1000.');
  begin
    perform timestamptz 'epoch' at time zone p.tz;
  exception when invalid_parameter_value then
    raise exception 'unknown time zone %', to_json(p.tz) using errcode = 'TB005',
      hint = 'Use a name like Europe/Berlin or UTC.';
  end;
  loop
    if p_wait then
      select k.* into s from tallybook.schedule k where k.name = p.name for update;
    else
      select k.* into s from tallybook.schedule k where k.name = p.name for update skip locked;
    end if;
    exit when found;
    p.since := p_at; p.due_at := p_at; p.created_at := p_at; p.changed_at := p_at; p.revision := pg_current_xact_id();
    p.fired_count := 0; p.skipped_count := 0; p.missed_count := 0; p.failed_count := 0;
    insert into tallybook.schedule values (p.*) on conflict do nothing;
    if found then
      perform tallybook._wake(' schedule');
      return 'created';
    end if;
    if not p_wait then return 'busy'; end if;
  end loop;
  if s.source <> p.source or s.app is distinct from p.app then
    perform tallybook._refuse(p_wait, format('schedule %s is declared in the code of app %s', to_json(p.name),
                                             to_json(s.app)), 'Change it there, or use another name.');
    return 'taken';
  end if;
  v_moved := (s.cron, s.every, s.tz, s.query) is distinct from (p.cron, p.every, p.tz, p.query);
  if tallybook._same_schedule(s, p) then return 'unchanged'; end if;
  update tallybook.schedule k
     set task = p.task, queue = p.queue, args = p.args, priority = p.priority, max_attempts = p.max_attempts,
         headers = p.headers, options = p.options, cron = p.cron, every = p.every, query = p.query, tz = p.tz,
         jitter = p.jitter, missed = p.missed, catch_up = p.catch_up, overlap = p.overlap,
         revision = pg_current_xact_id(), changed_at = p_at,
         since = case when v_moved then p_at else k.since end, tick = case when not v_moved then k.tick end,
         due_at = case when not v_moved then k.due_at when k.paused_at is null then p_at end,
         problem = case when not v_moved then k.problem end
   where k.name = p.name;
  if v_moved and s.paused_at is null then perform tallybook._wake(' schedule'); end if;
  return 'changed';
end $$;

-- _same_schedule(a, b): whether two definitions are equal.
create or replace function tallybook._same_schedule(a tallybook.schedule, b tallybook.schedule) returns boolean
language sql immutable as $$
  select (a.task, a.queue, a.args, a.priority, a.max_attempts, a.headers, a.options, a.jitter, a.missed, a.catch_up,
          a.overlap, a.cron, a.every, a.tz, a.query)
         is not distinct from
         (b.task, b.queue, b.args, b.priority, b.max_attempts, b.headers, b.options, b.jitter, b.missed, b.catch_up,
          b.overlap, b.cron, b.every, b.tz, b.query)
$$;
