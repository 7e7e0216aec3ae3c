-- _cancel_aside(job_ids, error, at): end these jobs in scheduled or waiting as cancelled. Returns their number. The
-- caller has locked their rows.
--
-- They were never in a lane: the entry is inserted with its outcome, and a tombstone keeps it from being claimed until
-- the cursor of a claim or a truncate has passed it. A reason that a person gave before is kept. A person may retry
-- them.
-- Writes entry, outcome, tombstone; deletes from scheduled, waiting; see _leave_parents, _leave_limits, _leave_lines.
-- profile: nested
create or replace function tallybook._cancel_aside(p_ids bigint[], p_error jsonb, p_at timestamptz) returns int
language plpgsql
set lock_timeout = '20ms'  -- somebody's open transaction may cancel the same job
as $$
declare
  v_n int; v_lanes int[]; v_tasks text[]; v_counts bigint[]; v_attempts bigint[]; v_ordered bigint[]; v_keys text[];
begin
  insert into tallybook.tombstone as t (job_id, attempt, taken, created_at)
  select a.job_id, a.attempt, true, p_at
    from unnest(p_ids) i(id) join tallybook._aside a on a.job_id = i.id and a.place <> 'dead' order by a.job_id
  on conflict on constraint tombstone_pkey do update set taken = true;
  with was_scheduled as materialized (
    delete from tallybook.scheduled s using unnest(p_ids) i(id) where s.job_id = i.id returning s.*
  ), was_waiting as materialized (
    delete from tallybook.waiting w using unnest(p_ids) i(id) where w.job_id = i.id returning w.*
  ), gone as materialized (
    select s.job_id, s.enqueued_at, s.lane_id, s.attempt, s.failures, s.crashes, s.max_attempts, s.task, s.args,
           s.headers, s.unique_key, s.run_at, s.errors, s.expires_at, s.order_key, s.options from was_scheduled s
    union all
    select w.job_id, w.enqueued_at, w.lane_id, w.attempt, w.failures, w.crashes, w.max_attempts, w.task, w.args,
           w.headers, w.unique_key,
           w.run_at, w.errors, w.expires_at, coalesce(w.order_key, w.options #>> '{parents,order_key}'),
           case when w.options ? 'parents' then tallybook._parents_said(w.job_id, w.options)
                else w.options - 'held' end
      from was_waiting w
  ), lined as materialized (
    select g.*, nextval('tallybook.job_id') as seq, l.retention,
           (select t.reason from tallybook._cancel_of(g.job_id, g.attempt) t) as reason
      from gone g, lateral (select x.retention from tallybook.lane x where x.lane_id = g.lane_id limit 1) l
  ), put as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, errors, expires_at, order_key, options)
    select n.seq, n.job_id, n.enqueued_at, n.lane_id, n.attempt, n.retention, n.failures, n.crashes, n.max_attempts,
           n.task, n.args, n.headers,
           n.unique_key, n.run_at, n.errors, n.expires_at, n.order_key, n.options from lined n
  ), ended as (
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
    select pg_current_xact_id(), n.seq, n.job_id, p_at, n.retention, 'cancelled',
           case when n.reason is null then p_error else jsonb_build_object('message', n.reason) end
      from lined n order by n.job_id
  ), counted as (
    select n.lane_id, n.task, count(*) as jobs, sum(n.attempt) as attempts from lined n group by n.lane_id, n.task)
  select (select coalesce(sum(c.jobs), 0) from counted c), (select array_agg(c.lane_id) from counted c),
         (select array_agg(c.task) from counted c),
         (select array_agg(c.jobs) from counted c), (select array_agg(c.attempts) from counted c),
         (select array_agg(n.job_id) from lined n where n.order_key is not null),
         (select array_agg(distinct n.order_key) from lined n where n.order_key is not null)
    into v_n, v_lanes, v_tasks, v_counts, v_attempts, v_ordered, v_keys;
  if v_n = 0 then return 0; end if;
  perform tallybook._tally(v_lanes, v_tasks, array_fill('cancelled'::text, array[cardinality(v_lanes)]), v_counts,
                           v_attempts);
  -- The outcome records it now; the tombstone only keeps the entry from being claimed.
  update tallybook.tombstone t set cancelled = false from unnest(p_ids) i(id) where t.job_id = i.id and t.taken
    and t.cancelled;
  perform tallybook._leave_parents(p_ids), tallybook._leave_limits(p_ids);
  if v_ordered is not null then perform tallybook._leave_lines(v_ordered, v_keys, p_at); end if;
  return v_n;
end $$;
