-- _subjects_read(upsert, task, scope, at, wanted, found): what each of these names is now; see _subjects_put.
--
-- Those of kind d, c or v stay, all others are read again. A subject that needs no further step becomes d, with its
-- report.
-- With the settings of _subjects_put. Reads subject_job, scheduled, tombstone, amendment.
create or replace function tallybook._subjects_read(p_upsert boolean, p_task text, p_scope text, p_at timestamptz,
  p_wanted tallybook._wanted_subject[], p_found tallybook._found_subject[])
returns tallybook._found_subject[] language plpgsql as $$
declare
  v_found tallybook._found_subject[];
  v_special boolean := exists (select from tallybook.tombstone) or exists (select from tallybook.amendment);
begin
  -- The planned ones, most of them as a rule, are seen at once; the others are looked at one by one.
  v_found := array(
    select row(f.now, f.job, case when f.now = 'd' then coalesce(f.report, case when not p_upsert then 'unchanged'
                                                                when f.state = 'active' then 'active' else 'dead' end)
               end, f.old_run_at, f.new_run_at, f.carry)::tallybook._found_subject
      from (
      select u.*, n.state, case when u.kind in ('d', 'c', 'v') then u.job_id else j.job_id end as job,
             case when u.kind in ('d', 'c', 'v') then u.kind
                  when j.job_id is null then 'n'
                  when n.state is null then 'g'
                  when not p_upsert or n.state in ('active', 'dead', 'killed') then 'd'
                  when n.state = 'completed' then 'r'
                  when s.planned then 'p' else 'l' end::"char" as now
        from unnest(p_wanted, p_found) with ordinality u
        left join lateral (select k.job_id, k.ended_as from tallybook.subject_job k
                            where k.task = p_task and k.subject = u.subject and k.scope = p_scope limit 1) j on true
        left join lateral (select true as planned from tallybook.scheduled x where x.job_id = j.job_id limit 1) s
          on true
        left join lateral (
          select exists (select from tallybook.tombstone x where x.job_id = j.job_id and x.cancelled)
              or exists (select from tallybook.amendment x where x.job_id = j.job_id) as changed
           where v_special) t on true
        left join lateral (
          select case when j.ended_as is not null then j.ended_as
                      when s.planned and t.changed is not true then 'planned'
                      when j.job_id is not null and u.kind not in ('d', 'c', 'v')
                      then (select k.state from tallybook._subject_now(j.job_id, p_at) k) end as state offset 0) n
          on true) f order by f.ordinality);
  perform tallybook._subject_absorb(u.job_id) from unnest(v_found) u where v_special and u.kind = 'p'
     and (select true from tallybook.amendment a where a.job_id = u.job_id limit 1);
  return v_found;
end $$;
