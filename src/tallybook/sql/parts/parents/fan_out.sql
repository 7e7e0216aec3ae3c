-- fan_out(queues, tasks, args, ..., afters, on_parents, failed_as): put many jobs in, of which some wait for others of
-- the same call.
--
-- Arrays of one length, as for enqueue_many, whose jobs those without parents are. Returns what enqueue_many returns.
--   afters      null, or the parents of a job as the text of an array: ids of jobs on record, and -1 for the first job
--               of this
--               call, -2 for the second, ...; these come before it
--   on_parents, failed_as  as in enqueue_after
-- Ends of jobs that others of this call wait for are told at once, others are found within about a second.
-- Errors: those of enqueue_many and enqueue_after. Nothing is put in then.
-- rights: producer
create or replace function tallybook.fan_out(queues text[], tasks text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, unique_keys text[] default null,
  max_attempts int[] default null, headers text[] default null, on_conflicts text[] default null,
  unique_whiles text[] default null, order_keys text[] default null, expires_ats timestamptz[] default null,
  options text[] default null, afters text[] default null, on_parents text[] default null,
  failed_as text[] default null, at timestamptz default clock_timestamp(), out job_ids bigint[], out created boolean[])
language plpgsql
-- profile: lookup
as $$
declare
  v_n int := cardinality(tasks); v_roots int[]; v_followed int[]; r record; v_ids bigint[]; v_created boolean[];
  v_after bigint[]; v_known bigint[]; v_id bigint;
  v_holder bigint; v_wake boolean := false;
begin
  job_ids := '{}'; created := '{}';
  if v_n is null or v_n <> any (array[
       cardinality(queues), cardinality(args), cardinality(run_ats), cardinality(priorities), cardinality(unique_keys),
       cardinality(max_attempts), cardinality(headers), cardinality(on_conflicts), cardinality(unique_whiles),
       cardinality(order_keys), cardinality(expires_ats), cardinality(options), cardinality(afters),
       cardinality(on_parents), cardinality(failed_as)]) then
    raise exception 'the arrays of fan_out have different lengths' using errcode = 'TB005';
  end if;
  if v_n = 0 then return; end if;
  select a.n, p.id into r from unnest(afters) with ordinality a(after, n), unnest(a.after::bigint[]) p(id)
   where p.id is null or p.id = 0 or p.id < 0 and -p.id >= a.n limit 1;
  if found then
    raise exception 'job % of the batch waits for %', r.n, case when r.id < 0
      then format('job %s of it, which does not come before it', -r.id)
                                                                else 'a job without an id' end
      using errcode = 'TB005', hint =
      'A job waits for jobs on record, and for those before it in the batch, so that none waits for itself.';
  end if;
  v_followed := array(select distinct (-p.id)::int from unnest(afters) a(after), unnest(a.after::bigint[]) p(id)
                      where p.id < 0);
  v_roots := array(select t.n from unnest(tasks, afters) with ordinality t(task, after, n)
                   where coalesce(t.after, '{}') = '{}' order by t.n);
  job_ids := array_fill(null::bigint, array[v_n]); created := array_fill(true, array[v_n]);

  if v_roots <> '{}' then
    select m.job_ids, m.created into v_ids, v_created
      from (select array_agg(f.queue order by f.n) as q, array_agg(f.task order by f.n) as t,
            array_agg(f.args order by f.n) as a,
                   array_agg(f.run_at order by f.n) as r, array_agg(f.priority order by f.n) as p,
                   array_agg(f.key order by f.n) as k,
                   array_agg(f.attempts order by f.n) as m, array_agg(f.header order by f.n) as h,
                   array_agg(f.conflict order by f.n) as c,
                   array_agg(f.while order by f.n) as w, array_agg(f.order_key order by f.n) as l,
                   array_agg(f.expires_at order by f.n) as x,
                   array_agg(case when f.n = any (v_followed) then (coalesce(f.option::jsonb, '{}')
                                                                    || '{"followed": true}')::text
                                  else f.option end order by f.n) as o
              from unnest(queues, tasks, args, run_ats, priorities, unique_keys, max_attempts, headers, on_conflicts,
                          unique_whiles, order_keys, expires_ats, options, afters) with ordinality
                     f(queue, task, args, run_at, priority, key, attempts, header, conflict, while, order_key,
                       expires_at, option, after, n)
             where coalesce(f.after, '{}') = '{}') g,
           lateral tallybook.enqueue_many(g.q, g.t, g.a, case when run_ats is not null then g.r end, g.p,
             case when unique_keys is not null then g.k end, g.m, g.h, g.c, g.w, case when order_keys is not null
                  then g.l end,
             case when expires_ats is not null then g.x end, g.o, at) m;
    for i in 1..cardinality(v_roots) loop
      job_ids[v_roots[i]] := v_ids[i]; created[v_roots[i]] := v_created[i];
    end loop;
  end if;

  for r in select f.*, coalesce(f.priority, 2) as lane_priority
             from unnest(queues, tasks, args, run_ats, priorities, unique_keys, max_attempts, headers, on_conflicts,
                         unique_whiles, order_keys, expires_ats, options, afters, on_parents, failed_as) with ordinality
                    f(queue, task, args, run_at, priority, key, max_attempts, headers, on_conflict, unique_while,
                      order_key, expires_at, options, after, on_parent, failed_as, n)
            where coalesce(f.after, '{}') <> '{}' order by f.n loop
    perform tallybook._check_name('task name', r.task, 200);
    perform tallybook._check_args(r.args::jsonb, r.headers::jsonb);
    if r.max_attempts not between 1 and 32767 then
      raise exception 'max_attempts % is out of range', r.max_attempts using errcode = 'TB005',
        hint = 'It goes from 1 to 32767.';
    end if;
    perform tallybook._check_options(r.order_key, r.expires_at, r.options::jsonb);
    if coalesce(r.on_parent, 'completed') not in ('completed', 'any') then
      raise exception 'on_parent % is unknown', to_json(r.on_parent) using errcode = 'TB005',
        hint = 'It is one of completed, any.';
    end if;
    if octet_length(r.failed_as) not between 1 and 200 then
      raise exception 'failed_as has 1 to 200 bytes' using errcode = 'TB005';
    end if;
    v_after := array(select coalesce(j.id, p.id) from unnest(r.after::bigint[]) with ordinality p(id, at)
                       left join unnest(job_ids) with ordinality j(id, n) on j.n = -p.id order by p.at);
    v_known := array(select p.id from unnest(r.after::bigint[]) p(id) where p.id > 0);
    v_id := nextval('tallybook.job_id');
    if r.key is not null then
      v_holder := tallybook._claim_key(r.task, r.key, v_id, coalesce(r.unique_while, 'running'),
                                       coalesce(r.on_conflict, 'skip'), r.args::jsonb,
                                       r.lane_priority, r.run_at, r.options::jsonb -> 'version', at);
      if v_holder <> v_id then
        if tallybook._waits_on(v_after, v_holder) then
          raise exception 'job % would wait for itself', v_holder
            using errcode = 'TB005', detail =
            format('It has the unique key %s, and is one of the parents, or one of them waits for it.', to_json(r.key));
        end if;
        job_ids[r.n] := v_holder; created[r.n] := false;
        continue;
      end if;
    end if;
    job_ids[r.n] := v_id;
    perform tallybook._put_child(v_id, r.queue, r.task, r.args::jsonb, r.run_at, r.lane_priority, r.key, r.max_attempts,
                                 r.headers::jsonb, at,
                                 r.order_key, r.expires_at, r.options::jsonb, v_after, v_known, r.on_parent,
                                 r.failed_as);
    v_wake := v_wake or v_known <> '{}' or false = any (created);
  end loop;
  if v_wake then perform tallybook._wake(' parents_resolve'); end if;
end $$;

-- _put_child(...): appends one job to waiting, under an id that is given, and its parents. TB002: one of p_known is not
-- on record.
create or replace function tallybook._put_child(p_job_id bigint, p_queue text, p_task text, p_args jsonb,
  p_run_at timestamptz, p_priority int, p_unique_key text, p_max_attempts int, p_headers jsonb, p_now timestamptz,
  p_order_key text, p_expires_at timestamptz, p_options jsonb, p_after bigint[], p_known bigint[], p_on_parent text,
  p_failed_as text) returns void
language plpgsql
-- profile: nested
as $$
declare
  v_missing bigint; e tallybook.entry;
begin
  select i into v_missing from unnest(p_known) i
   where not exists (select from tallybook.entry x where x.job_id = i)
     and not exists (select from tallybook.scheduled s where s.job_id = i)
     and not exists (select from tallybook.waiting w where w.job_id = i)
     and not exists (select from tallybook.dead d where d.job_id = i) limit 1;
  if found then
    raise exception 'there is no job %', v_missing using errcode = 'TB002', detail = 'A job cannot wait for it.',
      hint = 'Its transaction has not committed, or its history is past its retention.';
  end if;
  p_options := coalesce(p_options, '{}') || jsonb_build_object('followed', true, 'parents',
                                                               jsonb_strip_nulls(jsonb_build_object(
    'on', coalesce(p_on_parent, 'completed'), 'failed_as', p_failed_as, 'order_key', p_order_key)));
  select l.lane_id into e.lane_id from tallybook._lane(p_queue, p_priority, '') l;
  e.job_id := p_job_id; e.enqueued_at := p_now; e.attempt := 1; e.failures := 0; e.crashes := 0;
  e.task := p_task; e.args := p_args; e.headers := p_headers; e.unique_key := p_unique_key;
  e.max_attempts := p_max_attempts; e.run_at := p_run_at; e.expires_at := p_expires_at; e.options := p_options;
  perform tallybook._wait(e, p_now);
  insert into tallybook.parent (child_id, parent_id, place)
  select p_job_id, i, min(n) from unnest(p_after) with ordinality u(i, n) group by i;
end $$;

-- _waits_on(job_ids, job_id): whether one of these jobs is that job, or waits for it, through others too.
create or replace function tallybook._waits_on(p_job_ids bigint[], p_job_id bigint) returns boolean
language plpgsql stable
-- profile: lookup
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
