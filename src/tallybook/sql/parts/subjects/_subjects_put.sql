-- _subjects_put(upsert, queue, task, subjects, ...): what subject_push, subject_upsert and their bulk forms do.
--
-- Returns one report per given subject, in any order: place is its number. Each round reads all names at once; a
-- subject that moved between a look and a lock is handled in the next round. All locks are taken in one order, so that
-- two batches cannot deadlock: the rows of the names by name (new ones, then revived ones), then planned jobs by job
-- id, then jobs in line by job id. It waits for a name only while another producer creates or revives the same.
-- Rows are looked up one at a time (lateral, with a limit), and joined by hash: sessions keep the plans that they made
-- while the tables were empty, when reading the whole of an index is as cheap as one row of it.
-- kinds: n new, c created or v revived here and not enqueued yet, r to revive, g to create again, p planned, l in line,
-- d done. A queue with own names uses these, all others share theirs: see _subject_scope.
-- Reads queue, subject_job, scheduled, tombstone, see _subject_now; writes subject_job, scheduled, entry, amendment.
-- profile: batch
create or replace function tallybook._subjects_put(p_upsert boolean, p_queue text, p_task text, p_subjects text[],
  p_args text[], p_run_ats timestamptz[], p_priorities int[], p_max_attempts int, p_headers text[], p_options text[],
  p_at timestamptz)
returns table (place bigint, job_id bigint, report text, old_run_at timestamptz, new_run_at timestamptz)
language plpgsql as $$
declare
  v_wanted tallybook._wanted_subject[]; v tallybook._found_subject[]; r record; w record; v_soon boolean := false;
  v_n int := cardinality(p_subjects); v_scope text;
begin
  perform tallybook._check_name('queue', p_queue, 64), tallybook._check_name('task name', p_task, 200),
          tallybook._refuse(p_max_attempts not between 1 and 32767,
                            format('max_attempts %s is out of range', p_max_attempts), 'It must be from 1 to 32767.');
  perform tallybook._refuse(v_n is null or cardinality(p_args) is distinct from v_n or v_n <> any (array[
            cardinality(p_run_ats), cardinality(p_priorities), cardinality(p_headers), cardinality(p_options)]),
                            'the arrays of subjects have different lengths');
  perform tallybook._refuse(true, format('a subject has 1 to 512 bytes, number %s has %s', f.n,
                                         coalesce(octet_length(f.subject), 0)))
     from unnest(p_subjects) with ordinality f(subject, n)
    where f.subject is null or octet_length(f.subject) not between 1 and 512 limit 1;
  perform tallybook._refuse(true, format('subject number %s does not fit', f.n),
                            'Args are one JSON object of at most 1,000,000 bytes; headers have at most 8,000.')
     from unnest(p_args, p_headers) with ordinality f(args, headers, n)
    where f.args is null or left(f.args, 1) <> '{' or octet_length(f.args) > 1200000 or left(f.headers, 1) <> '{'
          or octet_length(f.headers) > 8000 limit 1;
  perform tallybook._check_links(h::jsonb -> 'links') from unnest(p_headers) h where h like '%"links"%'
          and h::jsonb ? 'links';
  perform tallybook._refuse(true, 'a run_at is infinite', 'Complete the subject, or leave run_at out.')
     from unnest(p_run_ats) u where not isfinite(u) limit 1;
  perform tallybook._refuse(true, 'a subject has no fair key', 'Each subject has one job, which comes at its own time.')
     from unnest(p_options) o where o::jsonb ? 'fair_key' limit 1;
  if p_options is not null then perform tallybook._check_options(null, null, o::jsonb) from unnest(p_options) o; end if;
  if v_n = 0 then return; end if;
  v_scope := tallybook._subject_scope(p_queue);
  -- Of those of one name the first counts for a push, the last for an upsert.
  v_wanted := array(
    select row(f.n, f.subject, f.args, f.run_at, f.priority, f.headers, f.options, f.lane_id,
               f.retention)::tallybook._wanted_subject
      from (select distinct on (u.subject collate "C") u.*
              from tallybook._lanes_of(array_fill(p_queue, array[v_n]), p_priorities) l,
                   unnest(p_subjects, p_args, p_run_ats, p_priorities, p_headers, p_options, l.lanes, l.retentions)
                     with ordinality as u(subject, args, run_at, priority, headers, options, lane_id, retention, n)
             order by u.subject collate "C", case when p_upsert then -u.n else u.n end) f);
  v := array(select row('?', null, null, null, null, null)::tallybook._found_subject from unnest(v_wanted));

  loop
    v := tallybook._subjects_read(p_upsert, p_task, v_scope, p_at, v_wanted, v);

    -- 1. The names: new ones, then those that are to be had again.
    if exists (select from unnest(v) u where u.kind = 'n') then
      with put as materialized (
        insert into tallybook.subject_job as k (task, subject, scope, job_id, made_at)
        select p_task, u.subject, v_scope, nextval('tallybook.job_id'), p_at
          from unnest(v_wanted, v) u where u.kind = 'n' order by u.subject collate "C"
        on conflict do nothing returning k.subject, k.job_id)
      select array_agg(row(case when p.job_id is null then u.kind else 'c' end, coalesce(p.job_id, u.job_id), u.report,
                           u.old_run_at, u.new_run_at, u.carry)::tallybook._found_subject order by u.ordinality) into v
        from unnest(v_wanted, v) with ordinality u left join put p on p.subject = u.subject;
    end if;
    for r in select u.* from unnest(v_wanted, v) with ordinality u where u.kind in ('r', 'g') order by u.ordinality loop
      select a.job_id, a.subject into w
        from tallybook._subject_again(p_task, r.subject, r.job_id, r.kind = 'r', p_at) a;
      continue when w.job_id is null;
      v[r.ordinality].job_id := w.job_id; v[r.ordinality].carry := w.subject;
      v[r.ordinality].kind := case r.kind when 'r' then 'v' else 'c' end;
    end loop;

    -- 2. Planned ones, in place.
    if exists (select from unnest(v) u where u.kind = 'p') then
      select c.known, v_soon or c.soon into v, v_soon
        from tallybook._subjects_change(p_queue, p_max_attempts, p_at, v_wanted, v) c;
    end if;

    -- 3. Those in line.
    for r in select u.* from unnest(v_wanted, v) with ordinality u where u.kind = 'l' order by u.job_id loop
      select * into w from tallybook._subject_amend(r.job_id, r.args::jsonb, r.options::jsonb -> 'version', r.run_at,
                                                    r.priority, p_at);
      continue when w.report is null;
      v[r.ordinality] := row('d', r.job_id, w.report, w.old_run_at, w.new_run_at, r.carry);
    end loop;
    exit when not exists (select from unnest(v) u where u.kind in ('n', 'r', 'g', 'p', 'l', '?'));
  end loop;

  perform tallybook._subjects_put_in(p_queue, p_task, v_scope, p_max_attempts, p_at, v_wanted, v)
    where exists (select from unnest(v) u where u.kind in ('c', 'v'));
  if v_soon then perform tallybook._wake(' promote'); end if;

  return query
  select g.n, u.job_id,
         case when g.n <> u.place and s.said in ('created', 'updated') then 'unchanged' else s.said end, u.old_run_at,
         case when u.kind = 'd' then u.new_run_at else coalesce(u.run_at, p_at) end
    from unnest(v_wanted, v) u join unnest(p_subjects) with ordinality g(subject, n) on g.subject = u.subject,
         lateral (select case u.kind when 'd' then u.report when 'c' then 'created' else 'updated' end as said) s;
end $$;
