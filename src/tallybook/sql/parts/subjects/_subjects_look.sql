-- _subjects_look(upsert, task, subjects, at, kinds, jobs, reports): what each of these names is now; see _subjects_put.
--
-- kinds: those that are d, c or v stay, all others are looked at anew; who has nothing more to wait for is d, with its
-- report. With the settings of _subjects_put. Reads subject_job, scheduled, tombstone, amendment.
create or replace function tallybook._subjects_look(p_upsert boolean, p_task text, p_subjects text[], p_at timestamptz,
  inout kinds "char"[], inout jobs bigint[], inout reports text[])
language plpgsql as $$
declare
  r record; w record; v_special boolean;
begin
  -- The planned ones, most of them as a rule, are seen at once; the others are looked at one by one.
  v_special := exists (select from tallybook.tombstone) or exists (select from tallybook.amendment);
  select array_agg(f.job order by f.n), array_agg(f.kind order by f.n),
         array_agg(case when f.kind = 'd' then coalesce(f.report, case when p_upsert then 'dead' else 'unchanged' end)
                   end order by f.n)
    into jobs, kinds, reports from (
    select u.n, u.report, case when u.kind in ('d', 'c', 'v') then u.job else j.job_id end as job,
           case when u.kind in ('d', 'c', 'v') then u.kind
                when j.job_id is null then 'n'
                when j.ended_as = 'completed' and p_upsert then 'r'
                when j.ended_as is not null then 'd'
                when s.planned is null or t.changed then '?'
                when p_upsert then 'p' else 'd' end::"char" as kind
      from unnest(p_subjects, kinds, jobs, reports) with ordinality u(subject, kind, job, report, n)
      left join lateral (select k.job_id, k.ended_as from tallybook.subject_job k
                          where k.task = p_task and k.subject = u.subject limit 1) j on true
      left join lateral (select true as planned from tallybook.scheduled x where x.job_id = j.job_id limit 1) s
        on true
      left join lateral (
        select exists (select from tallybook.tombstone x where x.job_id = j.job_id and x.cancelled)
            or exists (select from tallybook.amendment x where x.job_id = j.job_id) as changed
               where v_special) t on true) f;
  for r in select u.n, u.job from unnest(kinds, jobs) with ordinality u(kind, job, n) where u.kind = '?'
            order by u.n loop
    select k.state into w from tallybook._subject_now(r.job, p_at) k;
    if w.state is null then kinds[r.n] := 'g';
    elsif not p_upsert then reports[r.n] := 'unchanged'; kinds[r.n] := 'd';
    elsif w.state in ('active', 'dead', 'killed') then
      reports[r.n] := replace(w.state, 'killed', 'dead'); kinds[r.n] := 'd';
    elsif w.state = 'completed' then kinds[r.n] := 'r';
    elsif exists (select from tallybook.scheduled s where s.job_id = r.job) then
      perform tallybook._subject_absorb(r.job) where v_special;
      kinds[r.n] := 'p';
    else kinds[r.n] := 'l';
    end if;
  end loop;
end $$;
