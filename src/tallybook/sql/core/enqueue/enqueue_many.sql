-- enqueue_many(queues, tasks, args, ...): enqueue many jobs by one statement. Returns a report per job, in the given
-- order.
--
-- Takes arrays of one length (args and headers as JSON text), or null if all jobs use the default. created is false if
-- a live job has the unique key; its id is returned. Jobs with keys are stored one by one, in the order of their keys,
-- so that two calls with the same keys cannot deadlock; all others by one INSERT.
-- on_conflicts, unique_whiles, order_keys, expires_ats, options (as JSON text): as in enqueue.
-- Errors: TB005 an invalid job (the first one is named); TB008 a key that is taken; TB003 as in enqueue. Then
-- nothing is stored.
-- Reads and writes what enqueue does.
-- rights: producer
create or replace function tallybook.enqueue_many(queues text[], tasks text[], args text[],
  run_ats timestamptz[] default null, priorities int[] default null, unique_keys text[] default null,
  max_attempts int[] default null, headers text[] default null, on_conflicts text[] default null,
  unique_whiles text[] default null, order_keys text[] default null, expires_ats timestamptz[] default null,
  options text[] default null, at timestamptz default clock_timestamp(), out job_ids bigint[], out created boolean[])
language plpgsql as $$
declare v_n int := cardinality(tasks); v_lanes int[]; v_retentions "char"[]; v record; v_fair boolean;
  v_shuffled boolean;
begin
  job_ids := '{}'; created := '{}';
  if v_n is null or v_n <> any (array[
       cardinality(queues), cardinality(args), cardinality(run_ats), cardinality(priorities), cardinality(unique_keys),
       cardinality(max_attempts), cardinality(headers), cardinality(on_conflicts), cardinality(unique_whiles),
       cardinality(order_keys), cardinality(expires_ats), cardinality(options)]) then
    raise exception 'the arrays of enqueue_many have different lengths' using errcode = 'TB005';
  end if;
  perform tallybook._check_many(tasks, args, max_attempts, headers, order_keys, expires_ats, options, run_ats);
  job_ids := array(select nextval('tallybook.job_id') from generate_series(1, v_n));
  created := array_fill(true, array[v_n]);

  if unique_keys is not null then
    for v in select f.* from unnest(job_ids, queues, tasks, args, run_ats, priorities, unique_keys, max_attempts,
                                    headers, on_conflicts, unique_whiles, order_keys, expires_ats, options)
               with ordinality as f(id, queue, task, args, run_at, priority, key, max_attempts, headers,
                                    on_conflict, unique_while, order_key, expires_at, options, n)
              where f.key is not null order by f.task, f.key, f.n loop
      job_ids[v.n] := tallybook._claim_key(v.task, v.key, v.id, coalesce(v.unique_while, 'running'),
                        coalesce(v.on_conflict, 'skip'), v.args::jsonb, coalesce(v.priority, 2), v.run_at,
                        v.options::jsonb -> 'version', at);
      created[v.n] := job_ids[v.n] = v.id;
      if created[v.n] then
        perform tallybook._put(v.id, v.queue, v.task, v.args::jsonb, v.run_at, coalesce(v.priority, 2), v.key,
                               v.max_attempts, v.headers::jsonb, at, v.order_key, v.expires_at, v.options::jsonb);
      end if;
    end loop;
  end if;

  select * into v_lanes, v_retentions, v_shuffled from tallybook._lanes_of(queues, priorities);
  if v_shuffled then options := tallybook._shuffled_many(v_lanes, order_keys, options); end if;
  v_fair := exists (select from unnest(options) o where o::jsonb ? 'fair_key');
  insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                               task, args, headers, expires_at, order_key, options)
  select f.id, f.id, at, f.lane, 1, f.retention, 0, 0, f.max_attempts, f.task, f.args::jsonb, f.headers::jsonb,
         f.expires_at, f.order_key, f.options::jsonb
    from unnest(job_ids, v_lanes, v_retentions, tasks, args, run_ats, unique_keys, max_attempts, headers, expires_ats,
           order_keys, options) f(id, lane, retention, task, args, run_at, key, max_attempts, headers, expires_at,
                                  order_key, options)
   where f.key is null and (f.run_at is null or f.run_at <= at)
         and (not v_fair or (f.options::jsonb ? 'fair_key') is not true);
  if v_fair then
    perform tallybook._put_fair(job_ids, v_lanes, tasks, args, run_ats, unique_keys, max_attempts, headers, expires_ats,
                                options, at);
  end if;
  if order_keys is not null then
    perform tallybook._line_up_many(array_agg(f.order_key), array_agg(f.id), array_agg(f.id), true)
       from unnest(job_ids, run_ats, unique_keys, order_keys) f(id, run_at, key, order_key)
      where f.order_key is not null and f.key is null and (f.run_at is null or f.run_at <= at);
  end if;
  if run_ats is not null then
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, expires_at, order_key, options)
    select f.id, f.run_at, at, f.lane, 1, 0, 0, f.max_attempts, f.task, f.args::jsonb, f.headers::jsonb,
           f.expires_at, f.order_key, f.options::jsonb
      from unnest(job_ids, v_lanes, tasks, args, run_ats, unique_keys, max_attempts, headers, expires_ats, order_keys,
                  options) f(id, lane, task, args, run_at, key, max_attempts, headers, expires_at, order_key, options)
     where f.key is null and f.run_at > at;
    if exists (select from unnest(run_ats) r where r > at and r < at + interval '10 s') then
      perform tallybook._wake(' promote');
    end if;
  end if;
  perform tallybook._wake(d.queue) from (select distinct q from unnest(queues) q) d(queue);
end $$;
