-- recount(at): rebuild all counters from the ledgers. Returns the number of sums.
--
-- Call it after a move to another cluster, or if verify finds a difference.
-- Open jobs and history are counted; the totals of pruned history are kept. It reads everything
-- once; only other folds wait for it.
-- Errors: TB003 isolation level. Reads all ledgers and tables of jobs; writes fold, total, tally.
-- profile: whole
-- rights: operator
create or replace function tallybook.recount(at timestamptz default clock_timestamp()) returns bigint
language plpgsql as $$
declare v_number bigint; v_n bigint; v_own xid8; f tallybook.fold;
begin
  perform tallybook._read_committed('recount needs READ COMMITTED, this transaction is %s');
  perform pg_advisory_xact_lock(1413565449, hashtext('fold: one at a time'));
  -- What has come since the last fold belongs into the series; what is corrected does not.
  select x.* into f from tallybook.fold x order by x.number desc limit 1;
  if f.hi <= pg_snapshot_xmax(pg_current_snapshot()) then
    perform tallybook.fold(at => recount.at);
    f := null;
  end if;
  v_number := coalesce((select max(x.number) from tallybook.fold x), 0) + 1;
  v_own := pg_current_xact_id_if_assigned();
  -- One statement, one snapshot: rows that it sees are counted; others will be folded. So will the
  -- caller's own changes, which it sees: they are subtracted, because the caller may continue.
  with open as materialized (
    select c.* from tallybook._recounted_open() c
  ), ends as materialized (
    select x.lane_id, x.task, x.what, max(x.last_at) as last_at,
           case when x.what = 'event' then sum(x.before) when p.pruned then greatest(sum(x.n), sum(x.before))
                else sum(x.n) end as n,
           case when p.pruned then greatest(sum(x.attempts), sum(x.attempts_before))
                else sum(x.attempts) end as attempts
      from (select e.lane_id, e.task, replace(o.state::text, 'dead', 'died') as what, count(*) as n,
                   sum(e.attempt) as attempts, 0 as before, 0 as attempts_before, null::timestamptz as last_at
              from tallybook.outcome o
              join tallybook.entry e on e.retention = o.retention and e.xid = o.entry_xid and e.seq = o.entry_seq
             group by e.lane_id, e.task, o.state
            union all
            select s.lane_id, s.task, s.what::text, 0, 0, s.n, s.attempts, s.last_at from tallybook._folded_sums() s
             where s.what not in ('opened', 'scheduled', 'retrying', 'waiting', 'dead', 'unclaimed')
            union all
            -- events that came along from another cluster, counted there after its last fold: no ledger has them
            select t.lane_id, t.task, t.what::text, 0, 0, t.n, t.attempts, f.folded_at from tallybook.tally t
             where t.what = 'event' and (t.xid >= f.hi or t.xid = any (f.holes))) x
     cross join (select exists (select from tallybook.pruned) as pruned) p
     group by x.lane_id, x.task, x.what, p.pruned
  ), sums as materialized (
    select c.lane_id, c.task, case when c.what in ('available', 'running') then 'opened' else c.what end as what, c.n,
           c.attempts, null::timestamptz as last_at from open c
    union all select e.lane_id, e.task, e.what, e.n, e.attempts, e.last_at from ends e
    union all select e.lane_id, e.task, 'opened', e.n, e.attempts, null from ends e where e.what <> 'event'
  ), unclaimed as (  -- what of a lane has ended or gone and was never handed out: its tasks do not matter
    select s.lane_id, s.n - h.claimed - coalesce(a.n, 0) as n
      from (select s.lane_id, sum(s.n) as n from sums s where s.what = 'opened' group by s.lane_id) s
      left join (select c.lane_id, sum(c.n) as n from open c where c.what = 'available' group by c.lane_id) a
        on a.lane_id = s.lane_id
      cross join lateral tallybook._cursor_of(s.lane_id) h
  ), put as (
    insert into tallybook.total (checkpoint, n, attempts, last_at, lane_id, what, task)
    select v_number, sum(s.n), sum(s.attempts), max(s.last_at), s.lane_id, s.what::tallybook.counted, s.task
      from (select * from sums union all select u.lane_id, '', 'unclaimed', u.n, 0, null from unclaimed u
            union all
            select c.lane_id, c.task, c.what::text, -c.n, -c.attempts, null
              from tallybook._changed(v_own, v_own, array[v_own], '{}') c where v_own is not null
                   and c.what <> 'event') s
     group by s.lane_id, s.what, s.task having sum(s.n) <> 0
    returning 1
  ), folded as (
    insert into tallybook.fold (number, folded_at, hi, holes, last_job, checkpoint)
    select v_number, recount.at, pg_snapshot_xmax(s.s),
           array(select x from pg_snapshot_xip(s.s) x union all select v_own where v_own < pg_snapshot_xmax(s.s)), 0,
           v_number
      from (select pg_current_snapshot() as s) s
  )
  select count(*) into v_n from put;
  delete from tallybook.total t where t.checkpoint < v_number;
  -- Numbers that this cluster has not given out yet: they came along with data of another one.
  -- Only where there are some: a table without a key that is published may not even be asked to.
  if exists (select from tallybook.tally t where t.xid >= pg_snapshot_xmax(pg_current_snapshot()) and t.xid is distinct
             from v_own) then
    delete from tallybook.tally t where t.xid >= pg_snapshot_xmax(pg_current_snapshot()) and t.xid is distinct
      from pg_current_xact_id_if_assigned();
  end if;
  return v_n;
end $$;

-- _recounted_open(): the jobs that are open or dead, counted one by one where they are: by lane, task and state.
--
-- Available jobs are counted from the cursors on, running ones from the claims: neither relies on the data that the
-- counters use.
create or replace function tallybook._recounted_open() returns table (lane_id int, task text, what text, n bigint,
  attempts bigint)
language sql stable as $$
  select a.lane_id, a.task, a.job_state, count(*), sum(a.attempt)
    from tallybook._aside a group by 1, 2, 3
  union all
  select l.lane_id, a.task, 'available', a.n, a.attempts
    from tallybook.lane l, lateral tallybook._line(l.lane_id) a where l.retired_at is null
  union all
  select a.lane_id, e.task, 'running', count(*), sum(e.attempt)
    from tallybook.worker k, lateral tallybook._open_attempts(k.id, k.open_from) a
    join tallybook.entry e on e.lane_id = a.lane_id and e.retention = a.retention and e.xid = a.xid and e.seq = a.seq
   where k.ended_at is null group by 1, 2
$$;

-- _line(lane): the jobs in one line by task: behind the cursor, and late commits.
-- profile: nested
create or replace function tallybook._line(p_lane_id int) returns table (task text, n bigint, attempts bigint)
language plpgsql stable
set enable_nestloop = on  -- also where the caller has it off
as $$
begin
  return query
  select e.task, count(*), sum(e.attempt) from tallybook._line_entries(p_lane_id) e
   where coalesce((select false from tallybook.tombstone t where t.job_id = e.job_id and t.attempt = e.attempt
                   and t.taken limit 1), true)  -- taken out of the line by its id
   group by e.task;
end $$;
