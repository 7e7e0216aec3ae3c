-- _jobs_by_id(sources, given, lanes, mine, filter, low, high, below, most, looks): the matching jobs by id, highest
-- first, at most `most` and one more.
--
--   sources  of entry (all jobs that were ever in line), scheduled, scheduled_failed (with an error history), waiting,
--            waiting_failed, dead,
--            intent (cancelled, not recorded yet), taken (claimed by id, ahead of the cursor), given (ids)
--   lanes    jobs in others may be skipped
--   looks    most rows to skip; then the last row has no job, and place is where to continue
-- Rows are read in pieces that grow while few match.
create or replace function tallybook._jobs_by_id(p_sources text[], p_given bigint[], p_lanes int[], p_mine text[],
  p_filter jsonb, p_low bigint, p_high bigint, p_below bigint, p_most int, p_looks int)
returns table (place text, line tallybook.job_line, at timestamptz, n int) language plpgsql stable as $$
declare
  v_below bigint := least(coalesce(p_below, 9223372036854775807), p_high); v_low bigint := coalesce(p_low, 0);
  v_piece int := least(p_most + 1, 256); v_left int := p_looks; v_rows int; v_last bigint; v_ids bigint[]; r record;
  v_n int := 0; v_found int; v_xids xid8[]; v_seqs bigint[];
  v_task text := p_filter ->> 'task'; v_error text := lower(p_filter ->> 'error');
  v_line boolean := 'entry' = any (p_sources) and not coalesce(p_filter -> 'states' ? 'available', true);
begin
  if v_line then  -- without the jobs ahead of the cursors: they may be a million
    for r in select x.lane_id, e.xid, e.seq from tallybook.lane x, tallybook._line_up_to(x.lane_id) e loop
      v_xids[r.lane_id] := r.xid; v_seqs[r.lane_id] := r.seq;
    end loop;
  end if;
  loop
    select count(*), min(u.job_id),
           array_agg(distinct u.job_id order by u.job_id desc) filter (
             where (p_lanes is null or u.lane_id is null or u.lane_id = any (p_lanes))
               and (v_task is null or u.task is null or u.task = v_task)
               and (u.xid is null or (u.xid, u.seq) <= (v_xids[u.lane_id], v_seqs[u.lane_id]))
               and (v_error is null or u.error is null
                    or strpos(lower(concat_ws(' ', u.error ->> 'type', u.error ->> 'message')), v_error) > 0))
      into v_rows, v_last, v_ids
      from (select * from (
        (select e.job_id, e.lane_id, e.task, null::jsonb as error, case when v_line then e.xid end as xid, e.seq
           from tallybook.entry e where 'entry' = any (p_sources) and e.job_id < v_below and e.job_id >= v_low
          order by e.job_id desc limit v_piece)
        union all
        (select a.job_id, a.lane_id, a.task, a.errors -> -1, null, null from tallybook._aside a
          where a.place = any (p_sources) and a.job_id < v_below and a.job_id >= v_low order by a.job_id desc
                limit v_piece)
        union all
        (select a.job_id, a.lane_id, a.task, a.errors -> -1, null, null from tallybook._aside a
          where a.place || '_failed' = any (p_sources) and a.errors is not null
                and a.job_id < v_below and a.job_id >= v_low
          order by a.job_id desc limit v_piece)
        union all
        (select t.job_id, null, null, null, null, null from tallybook.tombstone t
          where (t.cancelled and 'intent' = any (p_sources) or t.taken and 'taken' = any (p_sources))
                and t.job_id < v_below and t.job_id >= v_low order by t.job_id desc limit v_piece)
        union all
        (select i, null, null, null, null, null from unnest(p_given) i where i < v_below and i >= v_low order by i desc
         limit v_piece)) a
        order by a.job_id desc limit v_piece) u;
    exit when v_rows = 0;
    -- The rows of the last job may not all be among these.
    if v_rows = v_piece and v_ids[cardinality(v_ids)] is distinct from v_last then v_ids := v_ids || v_last; end if;
    return query select (l.line).id::text, l.line, (l.line).enqueued_at, v_n + row_number() over ()::int
                   from tallybook._job_lines(v_ids, null, null, null, p_mine, p_filter, p_most + 1 - v_n) l;
    get diagnostics v_found = row_count;
    v_n := v_n + v_found;
    exit when v_n > p_most or v_rows < v_piece;
    v_below := v_last;
    -- one look-up costs as much as skipping this many
    v_left := v_left - v_rows - 100 * coalesce(cardinality(v_ids), 0);
    if v_left <= 0 then
      return query select v_last::text, null::tallybook.job_line,
                          (select j.enqueued_at from tallybook.job j where j.id = v_last limit 1), v_n + 1;
      return;
    end if;
    v_piece := case when cardinality(v_ids) > v_rows / 4 then least(v_piece, 256) else least(2 * v_piece, 4096) end;
  end loop;
end $$;

-- _job_lines(ids, attempts, errors, ends, mine, filter, most): the matching ones of these jobs as in the view job, in
-- their order, at most `most`.
--
--   attempts  only if this is the job's newest attempt; errors: only if this is its last error; ends: only if it
--             ended then
--   mine      only jobs of these kinds; null: all
-- nth: its number among the given jobs.
create or replace function tallybook._job_lines(p_ids bigint[], p_attempts int[], p_errors jsonb[],
  p_ends timestamptz[], p_mine text[], p_filter jsonb, p_most int)
returns table (nth bigint, line tallybook.job_line) language plpgsql stable as $$
declare
  v_queue text := p_filter ->> 'queue'; v_task text := p_filter ->> 'task'; v_error text := lower(p_filter ->> 'error');
  v_states text[] := case when p_filter ? 'states'
    then array(select jsonb_array_elements_text(p_filter -> 'states')) end;
  v_since timestamptz := p_filter ->> 'since'; v_before timestamptz := p_filter ->> 'before'; v_found int := 0;
  v_rows int; v_skip int := 0; v_size int := p_most;
begin
  -- Slice by slice, because one statement looks up all of its ids, also those behind the last one wanted.
  while v_skip < cardinality(p_ids) loop
    return query
    select i.n, row(j.id, j.queue, j.task, j.state, j.priority, j.attempt, j.attempts, j.failures, j.max_attempts,
                    j.enqueued_at, j.run_at, j.started_at, j.ended_at, j.worker, j.summary, j.reason, j.last_error,
                    j.subject, j.unique_key, j.progress, j.unserved, j.errors -> -1)::tallybook.job_line
      from (select u.id, u.n + v_skip as n from unnest(p_ids[v_skip + 1:v_skip + v_size]) with ordinality u(id, n)) i
     cross join lateral (select x.* from tallybook.job x where x.id = i.id limit 1) j
     where (v_queue is null or j.queue = v_queue) and (v_task is null or j.task = v_task)
           and (v_states is null or j.state = any (v_states))
       and (p_attempts is null or j.attempt = p_attempts[i.n]) and (p_errors is null or j.errors -> -1 = p_errors[i.n])
       and (p_ends is null or j.ended_at = p_ends[i.n]
            -- two of its attempts may be among the rows
            and (i.n = 1 or (p_ids[i.n - 1], p_ends[i.n - 1]) <> (i.id, p_ends[i.n])))
       and (v_since is null or j.enqueued_at >= v_since) and (v_before is null or j.enqueued_at < v_before)
       and (not p_filter ? 'unserved' or j.unserved)
       and (v_error is null or strpos(lower(concat_ws(' ', j.errors -> -1 ->> 'type', j.last_error)), v_error) > 0)
       and (not p_filter ? 'links' or not exists (  -- a key as text or as number
             select from jsonb_each_text(p_filter -> 'links') k where (j.links ->> k.key) is distinct from k.value))
       and (p_mine is null or tallybook._job_kind(j.id, j.state, j.attempt, j.ended_at) = any (p_mine))
     order by i.n limit p_most - v_found;
    get diagnostics v_rows = row_count;
    v_found := v_found + v_rows;
    exit when v_found = p_most;
    v_skip := v_skip + v_size; v_size := greatest(p_most, 50);
  end loop;
end $$;

-- _job_kind(job_id, state, attempt, ended_at): the kind of a job for a list: aside (scheduled, waiting, dead), running,
-- available, completed, cancelled; ahead of the cursor the last two are beyond (claimed by id) and unmet (the cancel
-- is not recorded yet).
create or replace function tallybook._job_kind(p_job_id bigint, p_state text, p_attempt int,
  p_ended_at timestamptz) returns text
language plpgsql stable as $$
begin
  if p_state in ('scheduled', 'retrying', 'waiting', 'dead') then return 'aside'; end if;
  if p_state = 'cancelled' and p_ended_at is null then
    return case when tallybook._behind(p_job_id) is null then 'unmet' else 'aside' end;
  end if;
  if p_state <> 'completed' then return p_state; end if;  -- most jobs, without a query
  return case when exists (select from tallybook.tombstone t where t.job_id = p_job_id and t.attempt = p_attempt
                           and t.taken)
    and exists (select from (select * from tallybook._newest_entry(p_job_id)) e, tallybook._line_up_to(e.lane_id) l
                 where (e.xid, e.seq) > (l.xid, l.seq)) then 'beyond' else p_state end;
end $$;
