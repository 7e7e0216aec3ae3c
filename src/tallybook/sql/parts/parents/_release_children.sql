-- _release_children(children, at): move those of these waiting jobs that wait for no parent to their lanes, or to
-- scheduled if their time has not come. Returns their number. The caller has locked their rows.
--
-- Failures go into the arg that the job has asked for, the first 1,000 in the order of the parents; their number goes
-- into its options.
-- profile: nested
create or replace function tallybook._release_children(p_children bigint[], p_at timestamptz) returns int
language plpgsql as $$
declare v_free bigint[]; v_queues text[]; v_later boolean; v_fair boolean; v_n int;
begin
  v_free := array(select w.job_id from tallybook.waiting w
                   where w.job_id = any (p_children)
                     and exists (select from tallybook.parent p where p.child_id = w.job_id)
                     and not exists (select from tallybook.parent p where p.child_id = w.job_id
                                     and p.ended_as is null));
  if v_free = '{}' then return 0; end if;
  with gone as materialized (
    delete from tallybook.waiting w where w.job_id = any (v_free) returning w.*
  ), known as materialized (
    delete from tallybook.parent p where p.child_id = any (v_free) returning p.*
  ), told as materialized (
    select k.child_id, count(*) as parents, count(k.failure) as failed,
           coalesce(jsonb_agg(k.failure order by k.place) filter (where k.failure is not null and k.nth <= 1000),
                    '[]') as failures
      from (select x.*, count(x.failure) over (partition by x.child_id order by x.place) as nth from known x) k
     group by k.child_id
  ), freed as materialized (
    -- The numbers are drawn in the order of the line, independent of the plan of the joins.
    select o.*, nextval('tallybook.job_id') as seq, coalesce(o.run_at > p_at, false) as later,
           o.options ? 'fair_key' and coalesce(o.run_at <= p_at, true) as fair
      from (select g.*, l.queue, l.retention, g.options #>> '{parents,order_key}' as key,
                   case when g.options #>> '{parents,failed_as}' is null then g.args
                        else g.args || jsonb_build_object(g.options #>> '{parents,failed_as}',
                                                          t.failures) end as told_args,
                   g.options || jsonb_build_object('parents', jsonb_build_object('ended', t.parents, 'failed',
                       t.failed)) as told_options
              from gone g join tallybook.lane l on l.lane_id = g.lane_id join told t on t.child_id = g.job_id
             order by g.enqueued_at, g.job_id) o
  ), put as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, errors, expires_at, order_key, options)
    select f.seq, f.job_id, f.enqueued_at, f.lane_id, f.attempt, f.retention, f.failures, f.crashes, f.max_attempts,
           f.task, f.told_args, f.headers, f.unique_key, coalesce(f.run_at, p_at), f.errors, f.expires_at, f.key,
           f.told_options
      from freed f where not f.later and not f.fair
  ), fair as (  -- the row deleted above is inserted again: its turn by its fair key comes later (fair_release)
    insert into tallybook.waiting (job_id, waits_since, enqueued_at, run_at, lane_id, attempt, failures, crashes,
                                   max_attempts, task, args, headers, unique_key, errors, expires_at, options, fair_key,
                                   fair_seq)
    select f.job_id, p_at, f.enqueued_at, f.run_at, tallybook._lane_beside(f.lane_id, 'fair'), f.attempt, f.failures,
           f.crashes, f.max_attempts, f.task, f.told_args, f.headers, f.unique_key, f.errors, f.expires_at,
           f.told_options, f.options ->> 'fair_key', f.seq
      from freed f where f.fair
  ), put_later as (
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, errors, expires_at, order_key, options)
    select f.job_id, f.run_at, f.enqueued_at, f.lane_id, f.attempt, f.failures, f.crashes, f.max_attempts, f.task,
           f.told_args, f.headers, f.unique_key, f.errors, f.expires_at, f.key, f.told_options
      from freed f where f.later
  ), ordered as (
    insert into tallybook.order_line (key, seq, job_id) select f.key, f.seq, f.job_id from freed f
      where f.key is not null and not f.later
  )
  select count(*), array_agg(distinct f.queue order by f.queue) filter (where not f.later and not f.fair),
         bool_or(f.later), bool_or(f.fair)
    into v_n, v_queues, v_later, v_fair from freed f;
  perform tallybook._wake(q) from unnest(v_queues) q;
  if v_fair then perform tallybook._wake(' fair_release'); end if;
  if v_later then perform tallybook._wake(' promote'); end if;
  return v_n;
end $$;
