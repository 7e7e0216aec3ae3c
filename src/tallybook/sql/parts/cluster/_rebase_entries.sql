-- _rebase_entries(lanes, to_lanes, from, before, ...): append the open attempts of some retired lanes again, at the end
-- of live ones.
--
-- An attempt is open if it has no outcome. That is exact for any transaction ids, any cluster of origin and any number
-- of calls, because each attempt is ended here first, and nothing is appended for one that cannot be ended.
--   from, before  only entries with from <= xid < before; null: all
--   xids, seqs, workers  the claimed ones with their workers: lost instead of moved, without a crash
-- A cancelled one ends as cancelled, as at a claim. Those that a worker of this cluster holds by id stay. The order is
-- that of seq, because (xid, seq) would compare ids of two clusters.
-- The caller sets the planner up for a whole ledger, or for a few of its rows. Reads entry, outcome, claim, tombstone;
-- writes outcome, entry, tombstone.
create or replace function tallybook._rebase_entries(p_lanes int[], p_to int[], p_from xid8[], p_before xid8,
  p_xids xid8[], p_seqs bigint[], p_workers text[], p_at timestamptz, out moved int, out lost int, out cancelled int)
language sql as $$
  with line as materialized (
    select f.lane_id, o.retention as class, f.from_xid, l.lane_id as to_lane, l.retention as to_retention
      from unnest(p_lanes, p_to, p_from) f(lane_id, to_lane, from_xid)
      join tallybook.lane o on o.lane_id = f.lane_id join tallybook.lane l on l.lane_id = f.to_lane
  ), key as materialized (  -- narrow first: most of a ledger has ended
    select e.lane_id, e.retention, e.xid, e.seq, n.to_lane, n.to_retention
      from line n join tallybook.entry e on e.lane_id = n.lane_id and e.retention = n.class
           and e.xid >= coalesce(n.from_xid, '0')
     where (p_before is null or e.xid < p_before)
       and not exists (select from tallybook.outcome o where o.retention = e.retention and o.entry_xid = e.xid
                       and o.entry_seq = e.seq)
       and (p_before is null or not exists (
             select from tallybook.claim c where c.one_xid is not null and c.one_xid = e.xid and c.one_seq = e.seq))
  ), open as materialized (
    select e.*, k.to_lane, k.to_retention
      from key k
      join tallybook.entry e on e.lane_id = k.lane_id and e.retention = k.retention and e.xid = k.xid and e.seq = k.seq
  ), met as materialized (
    select o.xid, o.seq, max(t.reason) as reason from open o join tallybook.tombstone t on t.job_id = o.job_id
     where t.cancelled and (t.attempt = o.attempt or t.attempt < o.attempt and not t.once)
     group by o.xid, o.seq
  ), fate as materialized (
    select o.*, case when m.seq is not null then 'cancelled' when r.seq is not null then 'lost'
           else 'moved' end::tallybook.ending as fate,
           case when m.seq is not null then case when m.reason is not null
                then jsonb_build_object('message', m.reason) end
                when r.seq is not null then jsonb_build_object('attempt', o.attempt, 'at', p_at, 'type', 'WorkerLost',
                                                               'worker', r.worker,
                  'message', format('the database moved away from worker %s', r.worker)) end as error
      from open o
      left join met m on m.xid = o.xid and m.seq = o.seq
      left join unnest(p_xids, p_seqs, p_workers) r(xid, seq, worker) on r.xid = o.xid and r.seq = o.seq
  ), ended as (
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
    select f.xid, f.seq, f.job_id, p_at, f.retention, f.fate, f.error from fate f order by f.job_id, f.attempt
    on conflict do nothing returning entry_xid, entry_seq, state
  ), put as (
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, run_at, errors, expires_at, order_key, options)
    select nextval('tallybook.job_id'), f.job_id, f.enqueued_at, f.to_lane, f.attempt + 1, f.to_retention, f.failures,
           f.crashes, f.max_attempts, f.task, f.args, f.headers, f.unique_key, f.run_at,
           case when f.fate = 'lost' then tallybook._errors(f.errors, f.error) else f.errors end,
           f.expires_at, f.order_key, f.options
      from (select f.* from fate f join ended d on d.entry_xid = f.xid and d.entry_seq = f.seq
             where f.fate <> 'cancelled' order by f.seq) f
  ), told as (
    -- Folds leave retired lanes out. Retiring them recounts the rows of the move; later rows
    -- are counted here.
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    select f.lane_id, count(*), sum(f.attempt), w.what::tallybook.counted, f.task
      from ended d join fate f on f.xid = d.entry_xid and f.seq = d.entry_seq cross
           join unnest(array[d.state::text, 'opened', 'unclaimed']) w(what)
     where p_before is not null group by f.lane_id, w.what, f.task
  ), free as materialized (
    -- The intents of cancelled ones, and the tombstones of all. Never waits; rescue sweeps the rest.
    select t.job_id, t.attempt from tallybook.tombstone t join fate f on f.job_id = t.job_id
     where case when f.fate = 'cancelled' then t.attempt = f.attempt or t.attempt < f.attempt and not t.once
                else t.attempt = f.attempt and t.taken and not t.cancelled end
       for update of t skip locked
  ), gone as (
    delete from tallybook.tombstone t using free f where t.job_id = f.job_id and t.attempt = f.attempt
  )
  select count(*) filter (where d.state = 'moved')::int, count(*) filter (where d.state = 'lost')::int,
         count(*) filter (where d.state = 'cancelled')::int from ended d
$$;
