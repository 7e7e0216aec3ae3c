-- _enqueue_batch(queue, task, places, keys, ...): enqueue those of these jobs whose unique key is free. Returns their
-- number.
--
-- Sorted by key, then by place in the query; jobs without a key come last. The ids are drawn here, in the order of the
-- places: the role `worker` may call this, and must not choose an id of another job.
-- One statement checks all keys by indexes: keys of open jobs are skipped. All others are locked one after the other in
-- their order, as in enqueue_many: a call that waits for another producer holds smaller keys only, so calls cannot wait
-- for each other. _claim_key decides the cases that this look cannot (a cancelled job, older holders, a producer that
-- came in between). Then one statement enqueues the jobs.
-- Reads unique_key, entry, outcome, scheduled, waiting, tombstone, lane; writes unique_key, entry, scheduled.
-- profile: batch
-- rights: worker
create or replace function tallybook._enqueue_batch(p_queue text, p_task text, p_places int[], p_keys text[],
  p_args jsonb[], p_run_ats timestamptz[], p_priorities int[], p_max_attempts int, p_headers jsonb, p_options jsonb,
  p_at timestamptz)
returns bigint language plpgsql
-- No nested loop: the few joins here are of one batch with itself, whose size the planner does not know. The look-ups
-- are scalar, lateral or by an array, which is always by index.
as $$
declare
  v_ours boolean[] := array_fill(false, array[cardinality(p_places)]); v_ids bigint[];
  v_distinct int[]; v_lanes int[]; v_retentions "char"[]; v_shuffled boolean;
  v_before text; v_now bigint; v_later bigint; v record; v_fair boolean := coalesce(p_options ? 'fair_key', false);
begin
  perform tallybook._check_batch(p_queue, p_task, p_max_attempts, p_headers, p_options);
  perform tallybook._query_row(f.key, f.args, f.run_at) from unnest(p_keys, p_args, p_run_ats) f(key, args, run_at)
    where f.args is null or jsonb_typeof(f.args) <> 'object' or pg_column_size(f.args) > 500000
       or octet_length(f.key) not between 1 and 512 or not isfinite(f.run_at);
  v_ids := array(
    select d.id from (
      select o.n, nextval('tallybook.job_id') as id
        from (select f.n from unnest(p_places) with ordinality f(place, n) order by f.place) o) d order by d.n);
  for v in
    with k as materialized (
      select f.n, f.id, f.key, u.generation, u.job_id, u.others
        from unnest(v_ids, p_keys) with ordinality f(id, key, n) left join lateral (
          select x.generation, x.job_id, x.others from tallybook.unique_key x
           where x.task = p_task and x.key = f.key order by x.generation desc limit 1) u on true
       where f.key is not null),
    jobs as materialized (select array_agg(k.job_id) as ids from k where k.job_id is not null),
    open as (  -- except cancelled ones: see _job_open
      select e.job_id from tallybook.entry e
       where e.job_id = any ((select ids from jobs)::bigint[])
         and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
      union all select a.job_id from tallybook._aside a
                 where a.place <> 'dead' and a.job_id = any ((select ids from jobs)::bigint[])),
    cancelled as (select t.job_id from tallybook.tombstone t where t.job_id = any ((select ids from jobs)::bigint[]))
    select k.n, k.id, k.key, k.generation, o.job_id is null and k.others is null as free
      from k left join open o on o.job_id = k.job_id left join cancelled c on c.job_id = k.job_id
     where o.job_id is null or c.job_id is not null
     order by k.n loop
    continue when v.key = v_before;  -- the key is here twice: the first has it, or was refused
    v_before := v.key;
    -- else see _claim_key
    if v.free and (v.generation is null or current_setting('transaction_isolation') = 'read committed') then
      insert into tallybook.unique_key (task, key, generation, job_id)
      values (p_task, v.key, coalesce(v.generation, 0) + 1, v.id) on conflict do nothing;
      if found then
        v_ours[v.n] := true;
        continue;
      end if;
    end if;
    v_ours[v.n] := tallybook._claim_key(p_task, v.key, v.id) = v.id;
  end loop;

  select array_agg(d.priority), array_agg(l.lane_id), array_agg(l.retention) into v_distinct, v_lanes, v_retentions
    from (select distinct f.priority from unnest(p_priorities, p_keys, v_ours) f(priority, key, ours)
           where f.ours or f.key is null) d, tallybook._lane(p_queue, d.priority, '') l;
  if v_lanes is null then return 0; end if;
  v_shuffled := exists (select from tallybook.lane l where l.shuffled and l.lane_id = any (v_lanes));
  v_fair := v_fair or v_shuffled;
  with u as materialized (
    select f.*, l.*, coalesce(f.run_at > p_at, false) as later,
           case when v_shuffled then tallybook._shuffled(p_options) else p_options end as options
      from unnest(v_ids, p_keys, p_args, p_run_ats, p_priorities, v_ours) f(id, key, args, run_at, priority, ours)
      join (select d.*, case when v_fair then tallybook._lane_beside(d.lane_id, 'fair') end as fair_id
              from unnest(v_distinct, v_lanes, v_retentions) d(of_priority, lane_id, retention)) l
        on l.of_priority = f.priority
     where f.ours or f.key is null
  ), fair as (
    insert into tallybook.waiting (job_id, waits_since, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                   task, args, headers, unique_key, options, fair_key, fair_seq)
    select u.id, p_at, p_at, u.fair_id, 1, 0, 0, p_max_attempts, p_task, u.args, p_headers, u.key, u.options,
           u.options ->> 'fair_key', u.id
      from u where not u.later and v_fair
  ), now as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, options)
    select u.id, u.id, p_at, u.lane_id, 1, u.retention, 0, 0, p_max_attempts, p_task, u.args, p_headers, u.key,
           p_options
      from u where not u.later and not v_fair
  ), later as (
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, options)
    select u.id, u.run_at, p_at, u.lane_id, 1, 0, 0, p_max_attempts, p_task, u.args, p_headers, u.key, u.options
      from u where u.later
  )
  select count(*) filter (where not u.later), count(*) filter (where u.later) into v_now, v_later from u;
  if v_now > 0 then perform tallybook._wake(case when v_fair then ' fair_release' else p_queue end); end if;
  perform tallybook._wake(' promote') where v_later > 0
     and exists (select from unnest(p_run_ats) r where r > p_at and r < p_at + interval '10 s');
  return v_now + v_later;
end $$;
