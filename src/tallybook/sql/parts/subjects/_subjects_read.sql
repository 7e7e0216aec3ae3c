-- _subjects_read(upsert, task, scope, at, wanted, found): what each of these names is now; see _subjects_put.
--
-- Those of kind d, c or v stay, all others are looked at anew; who has nothing more to wait for is d, with its report.
-- With the settings of _subjects_put. Reads subject_job, scheduled, tombstone, amendment.
create or replace function tallybook._subjects_read(p_upsert boolean, p_task text, p_scope text, p_at timestamptz,
  p_wanted tallybook._wanted_subject[], p_found tallybook._found_subject[])
returns tallybook._found_subject[] language plpgsql as $$
declare
  r record; v_state text; v_found tallybook._found_subject[];
  v_special boolean := exists (select from tallybook.tombstone) or exists (select from tallybook.amendment);
begin
  -- The planned ones, most of them as a rule, are seen at once; the others are looked at one by one.
  v_found := array(
    select row(f.now, f.job, case when f.now = 'd' then coalesce(f.report, case when p_upsert then 'dead'
                                                                           else 'unchanged' end) end,
               f.old_run_at, f.new_run_at, f.carry)::tallybook._found_subject
      from (
      select u.*, case when u.kind in ('d', 'c', 'v') then u.job_id else j.job_id end as job,
             case when u.kind in ('d', 'c', 'v') then u.kind
                  when j.job_id is null then 'n'
                  when j.ended_as = 'completed' and p_upsert then 'r'
                  when j.ended_as is not null then 'd'
                  when s.planned is null or t.changed then '?'
                  when p_upsert then 'p' else 'd' end::"char" as now
        from unnest(p_wanted, p_found) with ordinality u
        left join lateral (select k.job_id, k.ended_as from tallybook.subject_job k
                            where k.task = p_task and k.subject = u.subject and k.scope = p_scope limit 1) j on true
        left join lateral (select true as planned from tallybook.scheduled x where x.job_id = j.job_id limit 1) s
          on true
        left join lateral (
          select exists (select from tallybook.tombstone x where x.job_id = j.job_id and x.cancelled)
              or exists (select from tallybook.amendment x where x.job_id = j.job_id) as changed
           where v_special) t on true) f order by f.ordinality);
  for r in select u.ordinality as n, u.job_id as job from unnest(v_found) with ordinality u where u.kind = '?'
            order by u.ordinality loop
    select k.state into v_state from tallybook._subject_now(r.job, p_at) k;
    if v_state is null then v_found[r.n].kind := 'g';
    elsif not p_upsert then v_found[r.n].report := 'unchanged'; v_found[r.n].kind := 'd';
    elsif v_state in ('active', 'dead', 'killed') then
      v_found[r.n].report := replace(v_state, 'killed', 'dead'); v_found[r.n].kind := 'd';
    elsif v_state = 'completed' then v_found[r.n].kind := 'r';
    elsif exists (select from tallybook.scheduled s where s.job_id = r.job) then
      perform tallybook._subject_absorb(r.job) where v_special;
      v_found[r.n].kind := 'p';
    else v_found[r.n].kind := 'l';
    end if;
  end loop;
  return v_found;
end $$;
