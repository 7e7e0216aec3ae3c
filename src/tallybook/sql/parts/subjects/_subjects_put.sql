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
declare
  v_places bigint[]; v_subjects text[]; v_args text[]; v_run_ats timestamptz[]; v_priorities int[]; v_headers text[];
  v_options text[]; v_lanes int[]; v_retentions "char"[];
  v_jobs bigint[]; v_kinds "char"[]; v_reports text[]; v_olds timestamptz[]; v_news timestamptz[]; v_carry jsonb[];
  r record; w record; v_n int; v_made boolean; v_soon boolean := false;
begin
  perform tallybook._check_subjects(p_queue, p_task, p_subjects, p_args, p_run_ats, p_priorities, p_max_attempts,
                                    p_headers, p_options);
  -- Of those of one name the first counts for a push, the last for an upsert.
  select array_agg(f.n), array_agg(f.subject), array_agg(f.args), array_agg(f.run_at), array_agg(f.priority),
         array_agg(f.headers), array_agg(f.options), array_agg('?'::"char"), array_agg(null::bigint),
         array_agg(null::text), array_agg(null::timestamptz), array_agg(null::timestamptz), array_agg(null::jsonb)
    into v_places, v_subjects, v_args, v_run_ats, v_priorities, v_headers, v_options, v_kinds, v_jobs, v_reports,
         v_olds, v_news, v_carry
    from (select distinct on (u.subject collate "C") u.*
            from unnest(p_subjects, p_args, p_run_ats, p_priorities, p_headers, p_options) with ordinality
                   as u(subject, args, run_at, priority, headers, options, n)
           order by u.subject collate "C", case when p_upsert then -u.n else u.n end) f;
  v_n := cardinality(v_subjects);
  if v_n is null then return; end if;
  select * into v_lanes, v_retentions from tallybook._lanes(array_fill(p_queue, array[v_n]), v_priorities);

  loop
    select * into v_kinds, v_jobs, v_reports
      from tallybook._subjects_look(p_upsert, p_task, v_subjects, p_at, v_kinds, v_jobs, v_reports);

    -- 1. The names: new ones, then those that are to be had again.
    if 'n' = any (v_kinds) then
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
      select * into v_kinds, v_reports, v_olds, v_news, v_made
        from tallybook._subjects_change(p_queue, v_jobs, v_args, v_run_ats, v_priorities, v_headers, v_options, v_lanes,
                                        p_max_attempts, p_at, v_kinds, v_reports, v_olds, v_news);
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

  if v_kinds && '{c,v}' then
    perform tallybook._subjects_put_in(p_queue, p_task, v_kinds, v_jobs, v_subjects, v_args, v_run_ats, v_lanes,
      v_retentions, v_headers, v_options, v_carry, v_places, p_max_attempts, p_at);
  end if;
  if v_soon then perform tallybook._wake(' promote'); end if;

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
