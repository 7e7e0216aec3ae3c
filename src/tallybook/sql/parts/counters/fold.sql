-- fold(as_service, at): add the changes since the last fold to the counters. Workers run it; you never need to call it.
--
-- A fold adds the changes of all transactions that have ended at its snapshot, but had not at the snapshot of the
-- previous fold. Their rows can no longer change, so each row is counted exactly once, even after late commits,
-- rollbacks and crashes. New entries are read from entry, everything else from tally. No job waits for a fold, and
-- readers add what has not been folded yet.
--   as_service  claim the run first, at most about one per second, and record it
-- Returns the number of written sums; null: another session is folding, or has just done so.
-- Errors: TB003 isolation level. Reads lane, entry, tally; writes fold, series, total, service.
-- profile: nested
-- rights: worker
create or replace function tallybook.fold(as_service boolean default false,
  at timestamptz default clock_timestamp()) returns bigint language plpgsql as $$
declare
  f tallybook.fold; s pg_snapshot; v_own xid8; v_hi xid8; v_holes xid8[]; v_closed xid8[]; v_last_job bigint;
  v_n bigint;
begin
  perform tallybook._read_committed('fold needs READ COMMITTED, this transaction is %s');
  if as_service and not tallybook._service_claim('fold', at) then return null; end if;
  if not pg_try_advisory_xact_lock(1413565449, hashtext('fold: one at a time')) then return null; end if;
  select x.* into f from tallybook.fold x order by x.number desc limit 1;
  -- It takes a twentieth of a connection's time at most, however much there is to count.
  if as_service and f.folded_at between at - greatest(interval '0.5 s',
                                                      20 * (select s.last_took from tallybook.service s
                                                            where s.name = 'fold')) and at then
    return null;
  end if;
  -- Read before the snapshot: jobs enqueued meanwhile are looked for again.
  select q.last_value into v_last_job from tallybook.job_id q;
  if tallybook._is_foreign_cluster(false) then return null; end if;  -- moved to another cluster: rebase comes first
  s := pg_current_snapshot(); v_own := pg_current_xact_id_if_assigned(); v_hi := pg_snapshot_xmax(s);
  if v_hi < f.hi then  -- counted in another cluster
    v_n := tallybook.recount(at);
    if as_service then perform tallybook._service_ran('fold', at, v_n); end if;
    return v_n;
  end if;
  v_closed := array(select x from unnest(f.holes) x where pg_visible_in_snapshot(x, s) and x is distinct from v_own);
  v_holes := array(select x from unnest(f.holes) x where not pg_visible_in_snapshot(x, s) or x = v_own
                   union all select x from pg_snapshot_xip(s) x where x >= f.hi
                   union all select v_own where v_own >= f.hi and v_own < v_hi);
  insert into tallybook.series (at, number, n, attempts, lane_id, step, bucket, what, task)
  select fold.at, f.number + 1, sum(c.n), sum(x.attempts), c.lane_id, 0, x.bucket, x.what, c.task
    from tallybook._changed(f.hi, v_hi, v_closed, v_holes) c, lateral (
           values (c.what, null::smallint, c.attempts), ('took', c.took, 0), ('waited', c.waited, 0)
         ) x(what, bucket, attempts)
   where x.what = c.what or x.bucket is not null
   group by c.lane_id, c.task, x.what, x.bucket having sum(c.n) <> 0 or sum(x.attempts) <> 0;
  get diagnostics v_n = row_count;
  if (select count(*) from tallybook.series x where x.step = 0 and x.number > f.checkpoint)
     > 200 + 2 * (select count(*) from tallybook.total t where t.checkpoint = f.checkpoint) then
    perform tallybook._checkpoint(f.checkpoint, f.number + 1);
    f.checkpoint := f.number + 1;
  end if;
  insert into tallybook.fold (number, folded_at, hi, holes, last_job, checkpoint)
  values (f.number + 1, at, v_hi, v_holes, v_last_job, f.checkpoint);
  perform tallybook._thin(at);
  if as_service then perform tallybook._service_ran('fold', at, v_n); end if;
  return v_n;
end $$;

-- _changed(from, before, closed, holes): what transactions have changed with from <= id < before that are no holes, and
-- those in closed: by lane, task and state. before null: all that the statement sees from there on. Reads lane, entry,
-- tally.
-- profile: nested
create or replace function tallybook._changed(p_from xid8, p_before xid8, p_closed xid8[], p_holes xid8[])
returns table (lane_id int, task text, what tallybook.counted, took smallint, waited smallint, n bigint,
  attempts bigint) language plpgsql stable as $$
begin
  -- Retired lanes: the ids in them are of another cluster. What is still to come out of them has been recounted.
  return query
  with r as materialized (
    select p_from as low, coalesce(p_before, '18446744073709551615') as high, false as closed
    union all select x, x, true from unnest(p_closed) x
  )
  select l.lane_id, e.task, 'opened'::tallybook.counted, null::smallint, null::smallint, e.n, e.attempts
    from r, tallybook.lane l, lateral (
      select e.task, count(*) as n, sum(e.attempt) as attempts from tallybook.entry e
       where e.lane_id = l.lane_id and e.retention = l.retention and e.xid >= r.low and e.xid <= r.high
         and (r.closed or e.xid is distinct from p_before and e.xid <> all (p_holes))
       group by e.task) e
   where l.retired_at is null
  union all
  select t.lane_id, t.task, t.what, t.took, t.waited, sum(t.n), sum(t.attempts)::bigint
    from r, tallybook.tally t
   where t.xid >= r.low and t.xid <= r.high
     and (r.closed or t.xid is distinct from p_before and t.xid <> all (p_holes))
   group by t.lane_id, t.task, t.what, t.took, t.waited;
end $$;

-- _checkpoint(old, new): write the sums of all up to the fold new, whose series exists and which are not written
-- yet. Readers with older snapshots keep what they need.
-- profile: lookup
create or replace function tallybook._checkpoint(p_old bigint, p_new bigint) returns void language sql as $$
  insert into tallybook.total (checkpoint, n, attempts, last_at, lane_id, what, task)
  select p_new, sum(c.n), sum(c.attempts), max(c.last_at), c.lane_id, c.what, c.task from tallybook._folded_sums() c
   group by c.lane_id, c.what, c.task having sum(c.n) <> 0 or sum(c.attempts) <> 0;
  delete from tallybook.total t where t.checkpoint < p_new;
  delete from tallybook.fold f where f.number < p_old;
$$;

-- _thin(at): sum rows that are past their step's retention up to the next step, and delete those of the longest. Now
-- and then, one step at a time. Rows past their queue's metrics_retention are deleted instead.
-- profile: lookup
create or replace function tallybook._thin(p_at timestamptz) returns void language plpgsql as $$
declare k record; v_to timestamptz; v_checkpoint bigint; v_below timestamptz; v_over int[];
begin
  for k in select s.step, s.keep, s.thinned_to, n.step as next,
                  make_interval(secs => greatest(60, coalesce(n.step, s.step))) as width
             from tallybook.series_step s left join lateral (
               select x.step from tallybook.series_step x where x.step > s.step order by x.step limit 1) n on true
                      order by s.step loop
    v_to := date_bin(k.width, p_at - k.keep, timestamptz '2001-01-01 00:00+00');
    -- Never past what the step below it has still to hand on.
    if v_below < v_to then v_to := case when isfinite(v_below)
       then date_bin(k.width, v_below, timestamptz '2001-01-01 00:00+00') else v_below end; end if;
    v_below := k.thinned_to;
    continue when v_to <= k.thinned_to;
    select f.checkpoint into v_checkpoint from tallybook.fold f order by f.number desc limit 1;
    v_over := array(select l.lane_id from tallybook.queue q join tallybook.lane l on l.queue = q.name
                     where q.metrics_retention <= k.keep);
    with gone as (
      delete from tallybook.series x where x.step = k.step and x.at >= k.thinned_to and x.at < v_to
         and (k.step > 0 or x.number <= v_checkpoint)  -- what comes after it is part of the sums
      returning x.*)
    insert into tallybook.series (at, n, attempts, lane_id, step, bucket, what, task)
    select date_bin(k.width, g.at, timestamptz '2001-01-01 00:00+00') as begins, sum(g.n), sum(g.attempts), g.lane_id,
           k.next, g.bucket, g.what, g.task
      from gone g where k.next is not null and (g.lane_id = any (v_over)) is not true
     group by begins, g.lane_id, g.bucket, g.what, g.task having sum(g.n) <> 0 or sum(g.attempts) <> 0;
    update tallybook.series_step s set thinned_to = v_to
     where s.step = k.step and not exists (select from tallybook.series x where x.step = k.step and x.at >= k.thinned_to
                                           and x.at < v_to);
    if found then v_below := v_to; end if;
  end loop;
end $$;

-- _folded(below): whether the counters include all that transactions with lower ids have written: then it may be
-- dropped.
-- profile: nojit
create or replace function tallybook._folded(p_below xid8) returns boolean language sql stable as $$
  select coalesce((select f.hi >= p_below and not exists (select from unnest(f.holes) x where x < p_below)
                     from tallybook.fold f order by f.number desc limit 1), false)
$$;
