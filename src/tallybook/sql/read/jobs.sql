-- jobs(queue, task, states, links, error, unserved, since, before, after, max_jobs, max_looked): list jobs in pages,
-- newest first.
--
--   states      scheduled, retrying, waiting, available, running, completed, cancelled, dead; null: all
--   links       only jobs with all of these links: {"submission": 42}
--   error       only jobs whose last error contains this text in its type or message; case does not matter
--   unserved    true: only jobs whose task, or whose version of args, no live worker knows
--   since, before  only jobs enqueued at or after `since` and before `before`
--   after       the cursor of the last row of the previous page
--   max_jobs    page size, 1 to 1000
--   max_looked  how many rows of the ledger to skip at most, 1000 to 1,000,000
-- Each job is listed once, in its current state, with the columns of the view job. If there may be more, the last row
-- has no id: pass its cursor for the next page. looked_to is the time back to which rows were searched, even if the
-- page is not full. Without such a row the list is complete.
-- The order is by id. If a filter makes another order cheaper, it is the order in which jobs became available
-- (available, completed, all of a queue) or ended (cancelled, error); a merge of both is ordered by time. Pages neither
-- skip nor repeat a job that does not change. The cost does not depend on the length of the history.
-- Errors: TB005. Reads entry, outcome, claim, scheduled, waiting, dead, tombstone, worker, lane, by indexes only.
-- profile: nested
-- rights: operator
create or replace function tallybook.jobs(queue text default null, task text default null, states text[] default null,
  links jsonb default null, error text default null, unserved boolean default false, since timestamptz default null,
  before timestamptz default null, after text default null, max_jobs int default 50, max_looked int default 50000)
returns table (id bigint, queue_name text, task_name text, state text, priority int, attempts int, failures int,
  max_attempts int, enqueued_at timestamptz, run_at timestamptz, started_at timestamptz, ended_at timestamptz,
  worker text, summary text, reason text, last_error text, subject text, unique_key text, progress float4, cursor text,
  looked_to timestamptz)
language plpgsql stable as $$
declare
  v record; v_filter jsonb; v_n int := 0; v_cursor text := jobs.after; v_end boolean; r record;
  v_lines tallybook.job_line[]; v_cursors text[];
begin
  perform tallybook._refuse(not jobs.states <@ tallybook._job_states() or jobs.states = '{}',
            format('unknown states %s', jobs.states),
            format('Use %s.', array_to_string(tallybook._job_states(), ', ')));
  if jobs.links is not null then perform tallybook._check_links(jobs.links); end if;
  perform tallybook._check_range('max_jobs', jobs.max_jobs::text, jobs.max_jobs between 1 and 1000,
                                 'It must be from 1 to 1000.'),
          tallybook._check_range('max_looked', jobs.max_looked::text, jobs.max_looked between 1000 and 1000000,
                                 'It must be from 1000 to 1000000.');
  perform tallybook._refuse(
    jobs.after !~ E'^(i\\d{1,18}|[el]\\d{1,18}\\.\\d{1,18})(-(i\\d{1,18}|[el]\\d{1,18}\\.\\d{1,18})){0,2}$',
    format('%s is not a cursor', to_json(left(jobs.after, 100))), 'Pass the cursor of the previous page''s last row.');
  v_filter := jsonb_strip_nulls(jsonb_build_object('queue', jobs.queue, 'task', jobs.task, 'states', jobs.states,
                                                   'links', jobs.links, 'error', jobs.error,
    'unserved', nullif(jobs.unserved, false), 'since', jobs.since, 'before', jobs.before));
  select * into v from tallybook._job_sources(jobs.queue, jobs.states, jobs.links, jobs.error, jobs.unserved is true,
                                              jobs.since, jobs.before);
  perform tallybook._refuse(
    (jobs.after ~ 'i' and v.ids = '{}' or jobs.after ~ 'l' and v.line is null or jobs.after ~ 'e' and v.endings = '{}')
    and (v.ids <> '{}' or v.line is not null or v.endings <> '{}'),
    format('%s is the cursor of a list with other filters', to_json(jobs.after)), 'Pass the same filters again.');
  for r in
    select s.source, s.place, s.line, min(s.at) over (partition by s.source order by s.n) as at, s.n
      from (select 'i' as source, i.* from tallybook._jobs_by_id(
                v.ids, v.given, v.lanes, v.mine, v_filter, v.low, v.high, substring(jobs.after, E'i(\\d+)')::bigint,
                jobs.max_jobs, jobs.max_looked) i where v.ids <> '{}'
            union all
            select 'l', l.* from tallybook._jobs_by_line(v.line, v.lanes, v_filter,
                substring(jobs.after, E'l(\\d+)')::xid8, substring(jobs.after, E'l\\d+\\.(\\d+)')::bigint,
                jobs.max_jobs, jobs.max_looked) l where v.line is not null
            union all
            select 'e', e.* from tallybook._jobs_by_end(
                v.endings, v_filter, substring(jobs.after, E'e(\\d+)')::bigint,
                substring(jobs.after, E'e\\d+\\.(\\d+)')::bigint, jobs.max_jobs, jobs.max_looked) e
             where v.endings <> '{}') s
     order by at desc nulls last, s.source, s.n
  loop
    v_end := v_n = jobs.max_jobs or r.line is null;
    if v_n < jobs.max_jobs then  -- from the next place of this source
      v_cursor := (select string_agg(c, '-' order by c) from unnest(string_to_array(v_cursor, '-')
                                                                    || (r.source || r.place)) c
                    where c = r.source || r.place or left(c, 1) <> r.source);
    end if;
    v_lines := array_append(v_lines, case when not v_end then r.line end);
    v_cursors := array_append(v_cursors, v_cursor);
    exit when v_end;
    v_n := v_n + 1;
  end loop;
  return query
  select l.id, l.queue, l.task, l.state, l.priority, l.attempts, l.failures, l.max_attempts, l.enqueued_at, l.run_at,
         l.started_at, l.ended_at, l.worker, l.summary, l.reason, l.last_error, l.subject, l.unique_key, l.progress,
         v_cursors[l.ordinality], case when v_end and l.ordinality > v_n then r.at end
    from unnest(v_lines) with ordinality l order by l.ordinality;
end $$;

-- _job_states(): the states of a job, as lists name them.
create or replace function tallybook._job_states() returns text[] language sql immutable as $$
  select array['scheduled', 'retrying', 'waiting', 'available', 'running', 'completed', 'cancelled', 'dead']
$$;

-- _job_sources(queue, states, links, error, unserved, since, before): choose the sources of jobs() that avoid rows
-- without a match.
--
--   ids      sources in the order of ids: see _jobs_by_id; mine: the kinds of jobs that are listed from there (see
--            _job_kind)
--   given    the jobs with the links, if they are few, or the running ones
--   line     the part of the lanes to read: line (not yet claimed), past (claimed), all; null: nothing;
--            lanes: only these; null: all
--   endings  kinds of outcomes to read by time
--   low, high  ids that bound the time, without high
create or replace function tallybook._job_sources(p_queue text, p_states text[], p_links jsonb, p_error text,
  p_unserved boolean, p_since timestamptz, p_before timestamptz, out ids text[], out given bigint[], out mine text[],
  out line text, out lanes int[], out endings tallybook.ending[], out low bigint, out high bigint)
language plpgsql stable as $$
declare s text[] := coalesce(p_states, tallybook._job_states());
begin
  ids := '{}'; endings := '{}';
  if p_queue is not null then lanes := array(select l.lane_id from tallybook.lane l where l.queue = p_queue); end if;
  if lanes = '{}' then return; end if;
  if p_links is not null then
    given := array(select l from tallybook._linked(p_links, 10001) l);
    if cardinality(given) <= 10000 then
      ids := '{given}';
      return;
    end if;
    given := null;  -- too many to sort; then other sources meet them often enough
  end if;
  if p_unserved then  -- those are in lanes of their own
    lanes := array(select l.lane_id from tallybook.lane l where (p_queue is null or l.queue = p_queue)
                   and l.part not in ('', 'turn', 'fair'));
    line := case when s && '{available,cancelled}' and lanes <> '{}' then 'line' end;
    return;
  end if;
  -- Ids follow time, except for steps of the clock and slow statements.
  low := tallybook._job_id_at(p_since - interval '10 min');
  high := tallybook._job_id_at(p_before + interval '10 min');
  mine := '{aside}';
  if s && '{scheduled}' and p_error is null then ids := ids || 'scheduled'::text;
  elsif s && '{scheduled,retrying}' or s && '{cancelled}' and p_error is not null
    then ids := ids || 'scheduled_failed'::text; end if;
  if s && '{waiting}' and p_error is null then ids := ids || 'waiting'::text;
  elsif s && '{waiting,cancelled}' and p_error is not null then ids := ids || 'waiting_failed'::text; end if;
  if s && '{dead}' then ids := ids || 'dead'::text; end if;
  if p_error is not null then
    if s && '{available,running,completed,cancelled}' then endings := '{failed,dead,lost}'; end if;
  elsif s && '{available,completed}' and coalesce(p_since, p_before) is not null or s @> '{available,completed}'
        and p_queue is null then
    mine := null;
    ids := ids || 'entry'::text;
    if s && '{completed,running}' then ids := ids || 'taken'::text; end if;
  elsif s @> '{available,completed}' then
    line := 'all';
  else
    if s && '{available}' then line := 'line'; end if;
    if s && '{completed}' then line := 'past'; ids := ids || 'taken'::text; mine := mine || 'beyond'::text; end if;
    if s && '{running}' then
      given := array(select o.job_id from tallybook.worker w, lateral tallybook._open_attempts(w.id, w.open_from) o
                      where w.ended_at is null);
      ids := ids || 'given'::text; mine := mine || 'running'::text;
    end if;
    if s && '{cancelled}' then mine := mine || 'unmet'::text; endings := '{cancelled}'; end if;
  end if;
  if s && '{cancelled}' and p_error is null then ids := ids || 'intent'::text; end if;
end $$;

-- _job_id_at(at): the lowest id of a job enqueued at this time or later; null: at is null, or there is
-- none.
create or replace function tallybook._job_id_at(p_at timestamptz) returns bigint language plpgsql stable as $$
declare v_low bigint := 0; v_high bigint; v_middle bigint; v_id bigint; v_at timestamptz;
begin
  if p_at is null then return null; end if;
  v_high := 1 + greatest((select e.job_id from tallybook.entry e order by e.job_id desc limit 1),
                         (select a.job_id from tallybook._aside a order by a.job_id desc limit 1));
  while v_low < v_high loop  -- the answer is between these; v_high means none
    v_middle := v_low + (v_high - v_low) / 2;
    select x.id, x.at into v_id, v_at from (
      (select e.job_id, e.enqueued_at from tallybook.entry e where e.job_id >= v_middle order by e.job_id limit 1)
      union all
      (select a.job_id, a.enqueued_at from tallybook._aside a where a.job_id >= v_middle order by a.job_id
       limit 1)) x(id, at)
     order by x.id limit 1;
    if v_id is null or v_at >= p_at then v_high := v_middle; else v_low := v_id + 1; end if;
  end loop;
  return v_high;
end $$;
