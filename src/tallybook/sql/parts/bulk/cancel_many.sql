-- cancel_many(...): cancel all open jobs that match all filters, at most max_jobs. At least one filter is required.
--
--   states  scheduled, retrying, waiting, available, running, and dead; null: all but dead
--   args    the job's args contain this
-- Returns the number of jobs that will not start, and the number of running jobs that are being stopped. As with
-- cancel, only requests are recorded, but dead letters end as cancelled at once. The filter unique_key does not match
-- subjects: see subject_forget. Errors: TB005 without a filter, or an unknown state. Reads unique_key, order_line,
-- order_turn, scheduled, waiting, entry, claim, outcome, tombstone, amendment, worker, dead; writes what cancel does.
-- rights: operator
create or replace function tallybook.cancel_many(queue text default null, task text default null,
  unique_key text default null, order_key text default null, args jsonb default null, states text[] default null,
  reason text default null, max_jobs int default 10000, at timestamptz default clock_timestamp(), out cancelled int,
  out cancelling int)
language plpgsql as $$
begin
  perform tallybook._refuse(coalesce(queue, task, unique_key, order_key, args::text) is null,
                            'cancel_many needs a filter', 'Pass a queue, a task, a key or args.');
  perform tallybook._refuse(not states <@ '{scheduled,retrying,waiting,available,running,dead}',
            format('unknown states %s', states), 'Use scheduled, retrying, waiting, available, running, dead.');
  select count(*) filter (where c.said = 'cancelled'), count(*) filter (where c.said = 'cancelling')
    into cancelled, cancelling
    from (select tallybook.cancel(o.job_id, cancel_many.reason, cancel_many.at) as said from (
            select j.job_id from tallybook._open_jobs(cancel_many.queue, cancel_many.task, cancel_many.unique_key,
                     cancel_many.order_key, cancel_many.args, cancel_many.states) j
             order by j.job_id limit max_jobs) o offset 0) c;
end $$;

-- _open_jobs(filters): the open jobs that match, and dead ones where these are asked for. With a key the open ones are
-- found by it (see _open_by_key); else they are read from where the open jobs of these queues are, so that it does not
-- matter how many have ended.
-- profile: nested
create or replace function tallybook._open_jobs(p_queue text, p_task text, p_unique_key text, p_order_key text,
  p_args jsonb, p_states text[]) returns table (job_id bigint, state text) language plpgsql stable as $$
begin
  return query
  select f.job_id, f.state
    from (select * from tallybook._open_by_key(p_task, p_unique_key, p_order_key) k
           where p_unique_key is not null or p_order_key is not null
          union all
          select * from tallybook._open_by_queue(p_queue, p_states) q
           where p_unique_key is null and p_order_key is null
          union all
          select d.job_id, 'dead', d.lane_id, d.task, d.unique_key, d.order_key, d.args, null
            from tallybook.dead d where 'dead' = any (p_states)) f
    join tallybook.lane l on l.lane_id = f.lane_id
   where (p_states is null or f.state = any (p_states))
     and (p_queue is null or l.queue = p_queue) and (p_task is null or f.task = p_task)
     and (p_unique_key is null or f.unique_key = p_unique_key) and (p_order_key is null or f.order_key = p_order_key)
     and (p_args is null or coalesce(case when f.unique_key is not null then (
            select a.args from tallybook.amendment a where a.job_id = f.job_id) end, f.args) @> p_args)
     and not exists (select from tallybook._cancel_of(f.job_id, f.attempt));
end $$;

-- _open_by_key(task, unique_key, order_key): the open jobs with one of the two, by the indexes on them.
-- profile: nested
create or replace function tallybook._open_by_key(p_task text, p_unique_key text, p_order_key text)
returns table (job_id bigint, state text, lane_id int, task text, unique_key text, order_key text, args jsonb,
  attempt int) language plpgsql stable as $$
declare v_ids bigint[];
begin
  if p_unique_key is not null then
    v_ids := array(
      with recursive t(task) as (  -- from task to task: there are few, with many keys each
        select coalesce(p_task, (select u.task from tallybook.unique_key u order by u.task limit 1))
        union all
        select (select u.task from tallybook.unique_key u where u.task > t.task order by u.task limit 1)
          from t where p_task is null and t.task is not null)
      select unnest(k.job_id || coalesce(k.others, '{}')) from t cross join lateral (
               select u.job_id, u.others from tallybook.unique_key u
                where u.task = t.task and u.key = p_unique_key order by u.generation desc limit 1) k);
  else
    v_ids := array(select n.job_id from tallybook.order_line n where n.key = p_order_key
                   union select w.job_id from tallybook.waiting w where w.order_key = p_order_key
                   union select w.job_id from tallybook.waiting w  -- those that wait for their parents
                          where w.order_key is null and w.options #>> '{parents,order_key}' = p_order_key
                            and w.options #>> '{parents,order_key}' is not null
                   union select s.job_id from tallybook.scheduled s where s.order_key = p_order_key
                   union (select t.job_id from tallybook.order_turn t where t.key = p_order_key
                          order by t.generation desc limit 1));
  end if;
  return query
  select a.job_id, a.job_state, a.lane_id, a.task, a.unique_key,
         coalesce(a.order_key, a.options #>> '{parents,order_key}'), a.args, a.attempt
    from unnest(v_ids) i(id) join tallybook._aside a on a.job_id = i.id and a.place <> 'dead'
  union all
  select e.job_id, case when tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
                          or exists (select from tallybook.tombstone t where t.job_id = e.job_id
                                     and t.attempt = e.attempt and t.taken)
                        then 'running' else 'available' end,
         e.lane_id, e.task, e.unique_key, e.order_key, e.args, e.attempt
    from unnest(v_ids) i(id), lateral (
           select x.* from tallybook.entry x where x.job_id = i.id order by x.attempt desc limit 1) e
   where not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq));
end $$;

-- _open_by_queue(queue, states): the open jobs of a queue, or of all.
-- profile: nested
create or replace function tallybook._open_by_queue(p_queue text, p_states text[])
returns table (job_id bigint, state text, lane_id int, task text, unique_key text, order_key text, args jsonb,
  attempt int) language plpgsql stable as $$
begin
  return query
  select a.job_id, a.job_state, a.lane_id, a.task, a.unique_key, a.order_key, a.args, a.attempt
    from tallybook._aside a where a.place <> 'dead' and (p_states is null or a.place = any (p_states)
                                                         or a.place = 'scheduled' and 'retrying' = any (p_states))
  union all
  select e.job_id, 'available', e.lane_id, e.task, e.unique_key, e.order_key, e.args, e.attempt
    from tallybook.lane l, lateral tallybook._line_entries(l.lane_id) e
   where (p_queue is null or l.queue = p_queue) and (p_states is null or 'available' = any (p_states))
     and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq))
     and not exists (select from tallybook.tombstone t where t.job_id = e.job_id and t.attempt = e.attempt and t.taken)
  union all
  select e.job_id, 'running', e.lane_id, e.task, e.unique_key, e.order_key, e.args, e.attempt
    from tallybook.worker k, lateral tallybook._open_attempts(k.id, k.open_from) a
    join tallybook.entry e on e.lane_id = a.lane_id and e.retention = a.retention and e.xid = a.xid and e.seq = a.seq
   where k.ended_at is null and (p_states is null or 'running' = any (p_states));
end $$;
