-- _subjects_put(upsert, queue, task, subjects, ...): what subject_push, subject_upsert and their bulk forms do.
--
-- One row of report for each given, in any order: place says which. Each round reads all names at once; what moved
-- between a look and a lock goes to the next. Whatever is waited for is taken in one order, so that two batches cannot
-- deadlock: the rows of the names by name (made, then revived), then planned jobs by job id, then those in line by job
-- id. A name is waited for only while another producer makes or revives the same.
-- Rows are looked up one at a time (lateral, with a limit), and joined by hash: sessions keep the plans that they made
-- while the tables were empty, when reading the whole of an index is as cheap as one row of it.
-- kinds: n new, c made or v revived here and to be put in, r to be revived, g to be made again, p planned, l in line, d
-- done.
-- Reads subject_job, scheduled, tombstone, see _subject_now; writes subject_job, scheduled, entry, amendment.
create or replace function tallybook._subjects_put(p_upsert boolean, p_queue text, p_task text, p_subjects text[],
  p_args text[], p_run_ats timestamptz[], p_priorities int[], p_max_attempts int, p_headers text[], p_options text[],
  p_at timestamptz)
returns table (place bigint, job_id bigint, report text, old_run_at timestamptz, new_run_at timestamptz)
language plpgsql
-- profile: batch
as $$
#variable_conflict use_column
declare
  v_places bigint[]; v_subjects text[]; v_args text[]; v_run_ats timestamptz[]; v_priorities int[]; v_headers text[];
  v_options text[]; v_lanes int[]; v_retentions "char"[];
  v_jobs bigint[]; v_kinds "char"[]; v_reports text[]; v_olds timestamptz[]; v_news timestamptz[]; v_carry jsonb[];
  r record; w record; v_n int; v_made boolean; v_soon boolean := false; v_now boolean := false; v_special boolean;
begin
  perform tallybook._check_subjects(p_queue, p_task, p_subjects, p_args, p_run_ats, p_priorities, p_max_attempts,
                                    p_headers, p_options);
  -- Of those of one name the first counts for a push, the last for an upsert.
  select array_agg(f.n), array_agg(f.subject), array_agg(f.args), array_agg(f.run_at), array_agg(f.priority),
         array_agg(f.headers), array_agg(f.options)
    into v_places, v_subjects, v_args, v_run_ats, v_priorities, v_headers, v_options
    from (select distinct on (u.subject collate "C") u.*
            from unnest(p_subjects, p_args, p_run_ats, p_priorities, p_headers, p_options) with ordinality
                   as u(subject, args, run_at, priority, headers, options, n)
           order by u.subject collate "C", case when p_upsert then -u.n else u.n end) f;
  v_n := cardinality(v_subjects);
  if v_n is null then return; end if;
  select * into v_lanes, v_retentions from tallybook._lanes(array_fill(p_queue, array[v_n]), v_priorities);
  v_kinds := array_fill('?'::"char", array[v_n]);
  v_jobs := array_fill(null::bigint, array[v_n]);
  v_reports := array_fill(null::text, array[v_n]);
  v_olds := array_fill(null::timestamptz, array[v_n]);
  v_news := v_olds;
  v_carry := array_fill(null::jsonb, array[v_n]);

  loop
    -- What each is now. The planned ones, most of them as a rule, are seen at once; the others are looked at one by
    -- one.
    v_special := exists (select from tallybook.tombstone) or exists (select from tallybook.amendment);
    select array_agg(f.job order by f.n), array_agg(f.kind order by f.n) into v_jobs, v_kinds from (
      select u.n, case when u.kind in ('d', 'c', 'v') then u.job else j.job_id end as job,
             case when u.kind in ('d', 'c', 'v') then u.kind
                  when j.job_id is null then 'n'
                  when j.ended_as = 'completed' and p_upsert then 'r'
                  when j.ended_as is not null then 'e'
                  when s.planned and (not v_special or not t.changed) then 'p'
                  else '?' end::"char" as kind
        from unnest(v_subjects, v_kinds, v_jobs) with ordinality u(subject, kind, job, n)
        left join lateral (select k.job_id, k.ended_as from tallybook.subject_job k
                            where k.task = p_task and k.subject = u.subject limit 1) j on true
        left join lateral (select true as planned from tallybook.scheduled x where x.job_id = j.job_id limit 1) s
          on true
        left join lateral (
          select exists (select from tallybook.tombstone x where x.job_id = j.job_id and x.cancelled)
              or exists (select from tallybook.amendment x where x.job_id = j.job_id) as changed
                 where v_special) t on true) f;
    v_made := false;
    for r in select u.n, u.kind, u.job from unnest(v_kinds, v_jobs) with ordinality u(kind, job, n) order by u.n loop
      case r.kind
        when 'n' then v_made := true;
        when 'e' then v_reports[r.n] := case when p_upsert then 'dead' else 'unchanged' end; v_kinds[r.n] := 'd';
        when 'p' then if not p_upsert then v_reports[r.n] := 'unchanged'; v_kinds[r.n] := 'd'; end if;
        when '?' then
          select k.state into w from tallybook._subject_now(r.job, p_at) k;
          if w.state is null then v_kinds[r.n] := 'g';
          elsif not p_upsert then v_reports[r.n] := 'unchanged'; v_kinds[r.n] := 'd';
          elsif w.state in ('active', 'dead', 'killed') then v_reports[r.n] := replace(w.state, 'killed',
              'dead'); v_kinds[r.n] := 'd';
          elsif w.state = 'completed' then v_kinds[r.n] := 'r';
          elsif exists (select from tallybook.scheduled s where s.job_id = r.job) then
            perform tallybook._subject_absorb(r.job) where v_special;
            v_kinds[r.n] := 'p';
          else v_kinds[r.n] := 'l';
          end if;
        else null;
      end case;
    end loop;

    -- 1. The names: new ones, then those that are to be had again.
    if v_made then
      with put as materialized (
        insert into tallybook.subject_job as k (task, subject, job_id, made_at)
        select p_task, u.subject, nextval('tallybook.job_id'), p_at
          from unnest(v_subjects, v_kinds) u(subject, kind) where u.kind = 'n' order by u.subject collate "C"
        on conflict do nothing returning k.subject, k.job_id)
      select array_agg(coalesce(p.job_id, u.job) order by u.n),
             array_agg(case when p.job_id is null then u.kind else 'c' end order by u.n)
        into v_jobs, v_kinds
        from unnest(v_subjects, v_kinds, v_jobs) with ordinality u(subject, kind, job, n) left
             join put p on p.subject = u.subject;
    end if;
    for r in select u.* from unnest(v_subjects, v_kinds, v_jobs) with ordinality u(subject, kind, job, n)
              where u.kind in ('r', 'g') order by u.n loop
      select a.job_id, a.subject into w from tallybook._subject_again(p_task, r.subject, r.job, r.kind = 'r', p_at) a;
      if w.job_id is not null then
        v_jobs[r.n] := w.job_id; v_carry[r.n] := w.subject;
        v_kinds[r.n] := case r.kind when 'r' then 'v' else 'c' end;
      end if;
    end loop;

    -- 2. Planned ones, in place.
    if 'p' = any (v_kinds) then
      with want as materialized (
        select u.* from unnest(v_jobs, v_kinds, v_args, v_run_ats, v_priorities, v_headers, v_options,
                               v_lanes) with ordinality
                          u(job, kind, args, run_at, priority, headers, options, lane, n) where u.kind = 'p'
      ), old as materialized (
        select q.*, s.* from (select w.job, w.n from want w order by w.job) q(wanted, place), lateral (
          select x.* from tallybook.scheduled x where x.job_id = q.wanted limit 1 for update) s
      ), new as materialized (
        select c.*, (c.old_args, c.old_run_at, c.old_lane, c.old_options) is distinct
               from (c.args, c.run_at, c.lane_id, c.options)
                 or c.old_max is distinct from c.max_attempts as changed
          from (select q.n, o.job_id, o.enqueued_at, o.attempt, o.failures, o.crashes, o.task,
                       q.args::jsonb as args, o.args as old_args, coalesce(q.run_at, o.run_at) as run_at,
                       o.run_at as old_run_at, coalesce(q.headers::jsonb, o.headers) as headers,
                       coalesce(p_max_attempts, o.max_attempts)::smallint as max_attempts, o.max_attempts as old_max,
                       tallybook._subject_options(o.options, q.options::jsonb) as options, o.options as old_options,
                       o.lane_id as old_lane,
                       case when l.queue = p_queue and l.priority = coalesce(q.priority, l.priority) then o.lane_id
                            when q.priority is not null then q.lane
                            else (select x.lane_id from tallybook._lane(p_queue, l.priority, '') x) end as lane_id
                  from old o join want q on q.n = o.place, lateral (
                       select k.queue, k.priority from tallybook.lane k where k.lane_id = o.lane_id limit 1) l) c
      ), done as (
        -- They are there, and locked: this finds each by its key. An update that is joined to them could read the whole
        -- of scheduled instead, for a planner that takes it for empty.
        insert into tallybook.scheduled as s (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes,
                                              max_attempts, task, args, headers, options)
        select x.job_id, x.run_at, x.enqueued_at, x.lane_id, x.attempt, x.failures, x.crashes, x.max_attempts, x.task,
               x.args, x.headers, x.options
          from new x where x.changed order by x.job_id
        on conflict on constraint scheduled_pkey do update
          set args = excluded.args, run_at = excluded.run_at, lane_id = excluded.lane_id,
              max_attempts = excluded.max_attempts, options = excluded.options, headers = excluded.headers)
      select array_agg(case when x.n is null then u.kind else 'd' end order by u.n),
             array_agg(case when x.n is null then u.report when x.changed then 'updated' else 'unchanged' end
                       order by u.n),
             array_agg(coalesce(x.old_run_at, u.old) order by u.n), array_agg(coalesce(x.run_at, u.new) order by u.n),
             coalesce(bool_or(x.changed and x.run_at < p_at + interval '10 s'), false)
        into v_kinds, v_reports, v_olds, v_news, v_made
        from unnest(v_kinds, v_reports, v_olds, v_news) with ordinality u(kind, report, old, new, n)
        left join new x on x.n = u.n;
      v_soon := v_soon or v_made;
    end if;

    -- 3. Those in line.
    for r in select u.* from unnest(v_kinds, v_jobs, v_args, v_run_ats, v_priorities, v_options) with ordinality
                               u(kind, job, args, run_at, priority, options, n) where u.kind = 'l' order by u.job loop
      select * into w from tallybook._subject_amend(r.job, r.args::jsonb, r.options::jsonb -> 'version', r.run_at,
                                                    r.priority, p_at);
      if w.report is not null then
        v_reports[r.n] := w.report; v_olds[r.n] := w.old_run_at; v_news[r.n] := w.new_run_at; v_kinds[r.n] := 'd';
      end if;
    end loop;
    exit when not v_kinds && '{n,r,g,p,l,?}';
  end loop;

  -- What is new is put in.
  if v_kinds && '{c,v}' then
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, options)
    select u.job, u.run_at, p_at, u.lane, 1, 0, 0, p_max_attempts, p_task, u.args::jsonb, u.headers::jsonb, u.subject,
           coalesce(u.options::jsonb, '{}') || jsonb_build_object('subject', coalesce(u.carry, '{"iterations": 0}'))
      from unnest(v_kinds, v_jobs, v_subjects, v_args, v_run_ats, v_lanes, v_headers, v_options, v_carry)
             u(kind, job, subject, args, run_at, lane, headers, options, carry)
     where u.kind in ('c', 'v') and u.run_at > p_at;
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, options)
    select nextval('tallybook.job_id'), o.job, p_at, o.lane, 1, o.retention, 0, 0, p_max_attempts, p_task,
           o.args::jsonb, o.headers::jsonb, o.subject, o.run_at, coalesce(o.options::jsonb, '{}')
           || jsonb_build_object('subject', coalesce(o.carry, '{"iterations": 0}'))
      from (select u.*
              from unnest(v_places, v_kinds, v_jobs, v_subjects, v_args, v_run_ats, v_lanes, v_retentions, v_headers,
                          v_options, v_carry)
                     u(place, kind, job, subject, args, run_at, lane, retention, headers, options, carry)
             where u.kind in ('c', 'v') and (u.run_at is null or u.run_at <= p_at)
             order by coalesce(u.run_at, p_at), u.place) o;  -- the oldest first, then as they were given
    v_now := found;
    v_soon := v_soon or exists (select from unnest(v_kinds, v_run_ats) u(kind, run_at)
                                 where u.kind in ('c', 'v') and u.run_at > p_at and u.run_at < p_at + interval '10 s');
  end if;
  if v_soon then perform tallybook._wake(' promote'); end if;
  if v_now then perform tallybook._wake(p_queue); end if;

  return query
  select g.n, u.job,
         case when u.kind = 'd' then case when g.wins or u.report not in ('created', 'updated') then u.report
              else 'unchanged' end
              when not g.wins then 'unchanged' when u.kind = 'c' then 'created' else 'updated' end,
         u.old, case when u.kind = 'd' then u.new else coalesce(u.run_at, p_at) end
    from unnest(v_subjects, v_kinds, v_jobs, v_reports, v_olds, v_news, v_run_ats) u(subject, kind, job, report, old,
        new, run_at)
    join (select x.subject, x.n, case when p_upsert then x.n = max(x.n) over p else x.n = min(x.n) over p end as wins
            from unnest(p_subjects) with ordinality x(subject, n) window p as (partition by x.subject)) g
                 on g.subject = u.subject;
end $$;
