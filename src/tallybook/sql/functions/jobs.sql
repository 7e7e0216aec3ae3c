-- jobs(queue, task, states, links, error, unserved, since, before, after, max_jobs, max_looked): a list of jobs, newest first, in pages.
--
--   states      of scheduled, retrying, waiting, available, running, completed, cancelled, dead; null: all
--   links       that have all of these: {"submission": 42}
--   error       whose last error's type or message contains this text, whatever the case
--   unserved    true: whose task no living worker knows
--   since, before  enqueued at or after, and before, these instants
--   after       the cursor of the last row of the page before
--   max_jobs    how many, 1 to 1000
--   max_looked  how many rows of the ledger may be passed over for them, 1000 to 1,000,000
-- A job is listed once, in its present state, with what the view job says of it. Where there may be more, there is a last row without id: from its
-- cursor the next page goes on, and looked_to says up to which time has been looked, also where too few were found. No such row: that was all.
-- The order is that of ids. Where a filter makes another one cheaper, it is the order in which jobs came into line (available, completed, all of a
-- queue) or have ended (cancelled, error); where both are needed they are merged by enqueued_at. Pages neither skip nor repeat a job that stays
-- as it is. Costs the same however much history there is.
-- Errors: TB005. Reads entry, outcome, claim, scheduled, waiting, dead, tombstone, worker, lane, by indexes only.
create or replace function tallybook.jobs(queue text default null, task text default null, states text[] default null, links jsonb default null,
  error text default null, unserved boolean default false, since timestamptz default null, before timestamptz default null,
  after text default null, max_jobs int default 50, max_looked int default 20000)
returns table (id bigint, queue_name text, task_name text, state text, priority int, attempts int, failures int, max_attempts int,
  enqueued_at timestamptz, run_at timestamptz, started_at timestamptz, ended_at timestamptz, worker text, summary text, reason text,
  last_error text, subject text, unique_key text, progress float4, cursor text, looked_to timestamptz)
language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_sources text[]; v_ids bigint[]; v_lanes int[]; v_line boolean := false; v_completed boolean := false; v_endings tallybook.ending[] := '{}';
  v_places text[]; v_n int := 0; v_cursor text := jobs.after; v_left boolean := false; r record; v_all text[] := tallybook._job_states();
  v_low bigint; v_high bigint; v_states text[] := jobs.states;
begin
  perform tallybook._check_jobs(jobs.states, jobs.after, jobs.max_jobs, jobs.max_looked);
  if v_states @> v_all then v_states := null; end if;
  if jobs.queue is not null then
    v_lanes := array(select l.lane_id from tallybook.lane l where l.queue = jobs.queue);
    if v_lanes = '{}' then return; end if;
  end if;
  if jobs.links is not null then
    perform tallybook._check_links(jobs.links);
    v_ids := array(select l from tallybook._linked(jobs.links, 10001) l);
  end if;
  if cardinality(v_ids) <= 10000 then
    v_sources := '{given}';
  else
    v_ids := null;
    v_sources := array(select distinct s.source from unnest(coalesce(v_states, v_all)) n(state), lateral (
      select case when n.state in ('scheduled', 'retrying') then 'scheduled' when n.state in ('waiting', 'dead', 'running') then n.state
                  when n.state = 'cancelled' then 'intent' else 'entry' end as source) s);
  end if;
  for r in
    select s.source, s.place, s.line, min(s.at) over (partition by s.source order by s.n) as at, s.n
      from (select 'i' as source, i.* from tallybook._jobs_by_id(v_sources, v_ids, v_lanes, jobs.queue, jobs.task, v_states, jobs.links, jobs.error,
              jobs.unserved, jobs.since, jobs.before, substring(jobs.after, 'i(\d+)')::bigint, jobs.max_jobs, jobs.max_looked) i) s
     order by at desc nulls last, s.source, s.n
  loop
    if v_n = jobs.max_jobs or r.line is null then
      cursor := case when r.line is null then tallybook._job_cursor(v_cursor, r.source, r.place) else v_cursor end;
      id := null; queue_name := null; task_name := null; state := null; priority := null; attempts := null; failures := null; max_attempts := null;
      enqueued_at := null; run_at := null; started_at := null; ended_at := null; worker := null; summary := null; reason := null;
      last_error := null; subject := null; unique_key := null; progress := null; looked_to := r.at;
      return next;
      return;
    end if;
    v_n := v_n + 1;
    v_cursor := tallybook._job_cursor(v_cursor, r.source, r.place);
    id := (r.line).id; queue_name := (r.line).queue; task_name := (r.line).task; state := (r.line).state; priority := (r.line).priority;
    attempts := (r.line).attempts; failures := (r.line).failures; max_attempts := (r.line).max_attempts; enqueued_at := (r.line).enqueued_at;
    run_at := (r.line).run_at; started_at := (r.line).started_at; ended_at := (r.line).ended_at; worker := (r.line).worker;
    summary := (r.line).summary; reason := (r.line).reason; last_error := (r.line).last_error; subject := (r.line).subject;
    unique_key := (r.line).unique_key; progress := (r.line).progress; cursor := v_cursor;
    return next;
  end loop;
end $$;

-- _job_states(): the states that a job can be in, as lists name them.
create or replace function tallybook._job_states() returns text[] language sql immutable as $$
  select array['scheduled', 'retrying', 'waiting', 'available', 'running', 'completed', 'cancelled', 'dead']
$$;

-- _check_jobs(states, after, max_jobs, max_looked): raises TB005 for what jobs() cannot do.
create or replace function tallybook._check_jobs(p_states text[], p_after text, p_max_jobs int, p_max_looked int) returns void
language plpgsql immutable as $$
begin
  if not p_states <@ tallybook._job_states() or p_states = '{}' then
    raise exception 'states % are not known', p_states
      using errcode = 'TB005', hint = format('They are some of %s.', array_to_string(tallybook._job_states(), ', '));
  end if;
  if p_max_jobs is null or p_max_jobs not between 1 and 1000 then
    raise exception 'max_jobs % is out of range', coalesce(p_max_jobs::text, 'null') using errcode = 'TB005', hint = 'It goes from 1 to 1000.';
  end if;
  if p_max_looked is null or p_max_looked not between 1000 and 1000000 then
    raise exception 'max_looked % is out of range', coalesce(p_max_looked::text, 'null') using errcode = 'TB005', hint = 'It goes from 1000 to 1000000.';
  end if;
  if p_after !~ '^[a-z]\d{1,19}(\.\d{1,19})?(-[a-z]\d{1,19}(\.\d{1,19})?){0,3}$' then
    raise exception '% is no cursor', to_json(left(p_after, 100)) using errcode = 'TB005', hint = 'Say the cursor of the last row of the page before.';
  end if;
end $$;

-- _job_cursor(cursor, source, place): the cursor with another place of one of its sources.
create or replace function tallybook._job_cursor(p_cursor text, p_source text, p_place text) returns text language sql immutable as $$
  select string_agg(k.one, '-' order by k.one) from (
    select c.one from unnest(string_to_array(p_cursor, '-')) c(one) where left(c.one, 1) <> p_source
    union all select p_source || p_place) k
$$;

-- _jobs_by_id(...): the jobs that match, by id, the highest first, at most `most` and one more; a last row without line says that there may be more.
--
--   sources  of entry (every job that has ever been in line), scheduled, waiting, dead, running, intent (cancelled, and nobody has met it yet), given (ids)
-- Rows are read in pieces that grow while nothing is found, and each costs as much as the rows that it is about.
create or replace function tallybook._jobs_by_id(p_sources text[], p_ids bigint[], p_lanes int[], p_queue text, p_task text, p_states text[], p_links jsonb,
  p_error text, p_unserved boolean, p_since timestamptz, p_before timestamptz, p_below bigint, p_most int, p_looks int)
returns table (place text, line tallybook.job_line, at timestamptz, n int) language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_below bigint := coalesce(p_below, 9223372036854775807); v_piece int := least(p_most + 1, 256); v_left int := p_looks;
  v_rows int; v_last bigint; v_jobs int; v_ids bigint[]; v_found int; k tallybook.job_line;
begin
  n := 0;
  if 'running' = any (p_sources) then
    p_ids := p_ids || array(select o.job_id from tallybook.worker w cross join lateral tallybook._open_attempts(w.id, w.open_from) o
                             where w.ended_at is null);
  end if;
  loop
    select count(*), min(u.job_id), count(distinct u.job_id),
           array_agg(distinct u.job_id) filter (where (p_lanes is null or u.lane_id is null or u.lane_id = any (p_lanes))
                                                  and (p_task is null or u.task is null or u.task = p_task))
      into v_rows, v_last, v_jobs, v_ids
      from (select * from (
        (select e.job_id, e.lane_id, e.task from tallybook.entry e
          where 'entry' = any (p_sources) and e.job_id < v_below order by e.job_id desc limit v_piece)
        union all
        (select s.job_id, s.lane_id, s.task from tallybook.scheduled s
          where 'scheduled' = any (p_sources) and s.job_id < v_below order by s.job_id desc limit v_piece)
        union all
        (select w.job_id, w.lane_id, w.task from tallybook.waiting w
          where 'waiting' = any (p_sources) and w.job_id < v_below order by w.job_id desc limit v_piece)
        union all
        (select d.job_id, d.lane_id, d.task from tallybook.dead d
          where 'dead' = any (p_sources) and d.job_id < v_below order by d.job_id desc limit v_piece)
        union all
        (select t.job_id, null, null from tallybook.tombstone t
          where 'intent' = any (p_sources) and t.job_id < v_below and t.cancelled order by t.job_id desc limit v_piece)
        union all
        (select i, null, null from unnest(p_ids) i where i < v_below order by i desc limit v_piece)) a
        order by a.job_id desc limit v_piece) u;
    exit when v_rows = 0;
    -- Of the last one not all rows may be among these.
    if v_rows = v_piece and v_ids[1] is distinct from v_last then v_ids := v_last || v_ids; end if;
    v_left := v_left - v_rows; v_found := 0; v_jobs := 0;
    for k in select l.* from tallybook._job_lines(v_ids, p_queue, p_task, p_states, p_links, p_error, p_unserved, p_since, p_before) l loop
      place := k.id; line := k; at := k.enqueued_at; n := n + 1;
      return next;
      if n > p_most then return; end if;
    end loop;
    exit when v_rows < v_piece;
    v_below := v_last;
    v_left := v_left - 20 * coalesce(cardinality(v_ids), 0);  -- looking a job up costs as much as passing that many over
    if v_left <= 0 then
      place := v_last; line := null; n := n + 1;
      at := (select j.enqueued_at from tallybook.job j where j.id = v_last);
      return next;
      return;
    end if;
    v_piece := least(greatest(v_left, 64), case when v_jobs < v_rows / 8 then 64 else 2 * v_piece end, 2048);
  end loop;
end $$;

-- _job_lines(ids, filters): what the view job says of these, those that match, the highest id first.
create or replace function tallybook._job_lines(p_ids bigint[], p_queue text, p_task text, p_states text[], p_links jsonb, p_error text,
  p_unserved boolean, p_since timestamptz, p_before timestamptz)
returns setof tallybook.job_line language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
  return query
  select j.id, j.queue, j.task, j.state, j.priority, j.attempts, j.failures, j.max_attempts, j.enqueued_at, j.run_at, j.started_at, j.ended_at,
         j.worker, j.summary, j.reason, j.last_error, j.subject, j.unique_key, j.progress, j.unserved
    from (select i from unnest(p_ids) i order by i desc) i(id) cross join lateral (select x.* from tallybook.job x where x.id = i.id limit 1) j
   where (p_queue is null or j.queue = p_queue) and (p_task is null or j.task = p_task) and (p_states is null or j.state = any (p_states))
     and (p_since is null or j.enqueued_at >= p_since) and (p_before is null or j.enqueued_at < p_before) and (p_unserved is not true or j.unserved)
     and (p_error is null or strpos(lower(concat_ws(' ', j.errors -> -1 ->> 'type', j.last_error)), lower(p_error)) > 0)
     and (p_links is null or tallybook._has_links(j.links, p_links));
end $$;

-- _has_links(links, wanted): whether a job's links have all that are wanted, a key as text or as number.
create or replace function tallybook._has_links(p_links jsonb, p_wanted jsonb) returns boolean language sql immutable as $$
  select not exists (select from jsonb_each_text(p_wanted) w where (p_links ->> w.key) is distinct from w.value)
$$;
