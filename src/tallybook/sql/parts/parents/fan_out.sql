-- fan_out(queues, tasks, args, ..., afters, on_parents, failed_as): enqueue many jobs, some of which wait for others of
-- the same call.
--
-- Arrays of one length, as for enqueue_many. Returns what enqueue_many returns.
--   afters      null, or the parents of a job as the text of an array: ids of existing jobs, and -1 for the first job
--               of this call, -2 for the second, ...; these must come before it
--   on_parents, failed_as  as in enqueue_after
-- Jobs that wait for others of this call continue at once when those end, others within about a second.
-- Unique keys are taken in their order, as in enqueue_many: first those of jobs without parents, then those of jobs
-- that wait. Two calls can deadlock (40P01) only if a key belongs to a job without parents in one call and to a job
-- with parents in the other.
-- Errors: those of enqueue_many and enqueue_after. Then nothing is enqueued.
-- Reads lane, entry, scheduled, waiting, dead, parent; writes what enqueue_many writes, waiting, parent.
-- profile: lookup
-- rights: producer
create or replace function tallybook.fan_out(queues text[], tasks text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, unique_keys text[] default null,
  max_attempts int[] default null, headers text[] default null, on_conflicts text[] default null,
  unique_whiles text[] default null, order_keys text[] default null, expires_ats timestamptz[] default null,
  options text[] default null, afters text[] default null, on_parents text[] default null,
  failed_as text[] default null, at timestamptz default clock_timestamp(), out job_ids bigint[], out created boolean[])
language plpgsql as $$
declare
  v_n int := cardinality(tasks); v_root boolean[]; v_followed int[]; r record; v_ids bigint[]; v_created boolean[];
  v_after bigint[]; v_known bigint[]; v_missing bigint; v_wake boolean := false; k int := 0;
  v_first bigint; e tallybook.entry;
begin
  job_ids := '{}'; created := '{}';
  perform tallybook._refuse(v_n is null or v_n <> any (array[
       cardinality(queues), cardinality(args), cardinality(run_ats), cardinality(priorities), cardinality(unique_keys),
       cardinality(max_attempts), cardinality(headers), cardinality(on_conflicts), cardinality(unique_whiles),
       cardinality(order_keys), cardinality(expires_ats), cardinality(options), cardinality(afters),
       cardinality(on_parents), cardinality(failed_as)]), 'the arrays of fan_out have different lengths');
  if v_n = 0 then return; end if;
  perform tallybook._refuse(true, format('job %s of the batch waits for %s', a.n, case when p.id < 0
            then format('job %s of it, which does not come before it', -p.id) else 'a job without an id' end),
            'A job can wait for existing jobs and for those before it in the batch, so that none waits for itself.')
     from unnest(afters) with ordinality a(after, n), unnest(a.after::bigint[]) p(id)
    where p.id is null or p.id = 0 or p.id < 0 and -p.id >= a.n limit 1;
  v_followed := array(select distinct (-p.id)::int from unnest(afters) a(after), unnest(a.after::bigint[]) p(id)
                      where p.id < 0);
  v_root := array(select coalesce(t.after, '{}') = '{}' from unnest(tasks, afters) with ordinality t(task, after, n)
                  order by t.n);
  job_ids := array_fill(null::bigint, array[v_n]); created := array_fill(true, array[v_n]);

  if true = any (v_root) then
    select m.job_ids, m.created into v_ids, v_created
      from tallybook.enqueue_many(
             tallybook._picked(coalesce(queues, array_fill(null::text, array[v_n])), v_root),
             tallybook._picked(tasks, v_root), tallybook._picked(args, v_root), tallybook._picked(run_ats, v_root),
             tallybook._picked(priorities, v_root), tallybook._picked(unique_keys, v_root),
             tallybook._picked(max_attempts, v_root), tallybook._picked(headers, v_root),
             tallybook._picked(on_conflicts, v_root), tallybook._picked(unique_whiles, v_root),
             tallybook._picked(order_keys, v_root), tallybook._picked(expires_ats, v_root),
             tallybook._picked(array(
               select case when n = any (v_followed)
                           then (coalesce(o::jsonb, '{}') || '{"followed": true}')::text else o end
                 from unnest(tasks, options) with ordinality u(t, o, n) order by n), v_root), at) m;
    for i in 1..v_n loop
      continue when not v_root[i];
      k := k + 1; job_ids[i] := v_ids[k]; created[i] := v_created[k];
    end loop;
  end if;
  for i in 1..v_n loop
    continue when v_root[i];
    job_ids[i] := nextval('tallybook.job_id'); v_first := coalesce(v_first, job_ids[i]);
  end loop;

  for r in select f.*
             from unnest(queues, tasks, args, run_ats, priorities, unique_keys, max_attempts, headers, on_conflicts,
                         unique_whiles, order_keys, expires_ats, options, afters, on_parents, failed_as) with ordinality
                    f(queue, task, args, run_at, priority, key, max_attempts, headers, on_conflict, unique_while,
                      order_key, expires_at, options, after, on_parent, failed_as, n)
            where coalesce(f.after, '{}') <> '{}' order by f.task, f.key, f.n loop
    perform tallybook._check_name('task name', r.task, 200);
    perform tallybook._check_args(r.args::jsonb, r.headers::jsonb);
    perform tallybook._check_options(r.order_key, r.expires_at, r.options::jsonb, r.run_at);
    perform tallybook._check_range('max_attempts', r.max_attempts::text,
                                   coalesce(r.max_attempts between 1 and 32767, true), 'It must be from 1 to 32767.'),
            tallybook._refuse(r.on_parent not in ('completed', 'any'),
              format('on_parent %s is unknown', to_json(r.on_parent)), 'Use completed or any.'),
            tallybook._refuse(octet_length(r.failed_as) not between 1 and 200, 'failed_as must have 1 to 200 bytes');
    e := null; e.job_id := job_ids[r.n]; e.enqueued_at := at; e.attempt := 1; e.failures := 0;
    e.crashes := 0; e.task := r.task; e.args := r.args::jsonb; e.headers := r.headers::jsonb; e.unique_key := r.key;
    e.max_attempts := r.max_attempts; e.run_at := r.run_at; e.expires_at := r.expires_at; e.options := r.options::jsonb;
    r.priority := coalesce(r.priority, 2);
    if r.key is not null then
      job_ids[r.n] := tallybook._claim_key(r.task, r.key, e.job_id, coalesce(r.unique_while, 'running'),
                                           coalesce(r.on_conflict, 'skip'), e.args, r.priority, r.run_at,
                                           e.options -> 'version', at);
      created[r.n] := job_ids[r.n] = e.job_id;
      continue when not created[r.n];
    end if;
    e.options := coalesce(e.options, '{}') || jsonb_build_object('followed', true, 'parents', jsonb_strip_nulls(
      jsonb_build_object('on', coalesce(r.on_parent, 'completed'), 'failed_as', r.failed_as,
                         'order_key', r.order_key)));
    select l.lane_id into e.lane_id from tallybook._lane(r.queue, r.priority, '') l;
    if r.order_key is null and (select l.shuffled from tallybook.lane l where l.lane_id = e.lane_id) then
      e.options := tallybook._shuffled(e.options);
    end if;
    perform tallybook._wait(e, e.enqueued_at);
  end loop;

  for r in select f.* from unnest(afters, unique_keys) with ordinality f(after, key, n)
            where coalesce(f.after, '{}') <> '{}' order by f.n loop
    v_after := array(select coalesce(j.id, p.id) from unnest(r.after::bigint[]) with ordinality p(id, at)
                       left join unnest(job_ids) with ordinality j(id, n) on j.n = -p.id order by p.at);
    v_known := array(select p.id from unnest(r.after::bigint[]) p(id) where p.id > 0);
    if not created[r.n] then
      if tallybook._waits_on(v_after, job_ids[r.n]) then
        raise exception 'job % would wait for itself', job_ids[r.n]
          using errcode = 'TB005', detail =
          format('It has the unique key %s, and is one of the parents, or one of them waits for it.', to_json(r.key));
      end if;
      continue;
    end if;
    -- One look-up each: a join may read all of a table. No caller knows an id that is as new as this call.
    select i into v_missing from unnest(v_known) i
     where i >= v_first or coalesce((select true from tallybook.entry x where x.job_id = i limit 1),
                    (select true from tallybook._aside a where a.job_id = i limit 1)) is null limit 1;
    if found then
      raise exception 'there is no job %', v_missing using errcode = 'TB002', detail = 'A job cannot wait for it.',
        hint = 'Its transaction has not committed, or its history has been deleted.';
    end if;
    insert into tallybook.parent (child_id, parent_id, place)
    select job_ids[r.n], u.id, min(u.n) from unnest(v_after) with ordinality u(id, n) group by u.id;
    v_wake := v_wake or v_known <> '{}' or false = any (created);
  end loop;
  if v_wake then perform tallybook._wake(' parents_resolve'); end if;
end $$;

-- _picked(all, mask): the values at the places where the mask is true; null for null.
create or replace function tallybook._picked(p_all anyarray, p_mask boolean[]) returns anyarray
language sql immutable strict as $$
  select array(select u.x from unnest(p_all, p_mask) with ordinality u(x, picked, n) where u.picked order by u.n)
$$;

-- _waits_on(job_ids, job_id): whether one of these jobs is that job, or waits for it, directly or through others.
-- profile: lookup
create or replace function tallybook._waits_on(p_job_ids bigint[], p_job_id bigint) returns boolean
language plpgsql stable
set enable_hashjoin = off set enable_mergejoin = off  -- one parent after the other
as $$
begin
  return exists (
    with recursive above(id) as (
      select i from unnest(p_job_ids) i
      union
      select p.parent_id from above a join tallybook.parent p on p.child_id = a.id)
    select from above a where a.id = p_job_id);
end $$;
