-- _prune_range(class, keep, lower, upper, leaves, at): do one piece of the work on one range. Returns null: nothing to
-- do; 0: there is more to do soon; else the number of deleted rows.
--
-- Only outcomes can still be added to a range whose transactions have all ended. So what is found stays true, except
-- that a child can come: it is found piece by piece before any lock is taken, and the lock is held for the TRUNCATE
-- alone. A range is dropped when
-- - no transaction can write to it: all before its end have ended, or it is of another cluster and not reached yet;
-- - each entry has its outcome (they correspond one to one, so _range_count compares their numbers), and the newest is
--   older than keep;
-- - no attempt of a claim in it is open: its entry can be in another range. A worker's watermark shows where to look;
-- - no child waits for the end of one of its jobs without having been informed (parent), and the counters have passed
--   it;
-- - no lane's newest claim is in it. A copy that claims nothing is appended first, under the lane's lock, which is only
--   tried.
-- Reads all ledgers, worker, lane, parent, queue; writes history_range, claim, pruned, error_kept; deletes from
-- concurrency_holder; truncates.
-- profile: nojit
create or replace function tallybook._prune_range(p_code "char", p_keep interval, p_lower numeric, p_upper numeric,
  p_leaves regclass[], p_at timestamptz) returns bigint language plpgsql as $$
declare
  v_files oid[]; h tallybook.history_range; v_leaf name; v_quiet boolean := tallybook._range_quiet(p_lower, p_upper);
  v_lower xid8 := p_lower::text::xid8; v_upper xid8 := coalesce(p_upper, 18446744073709551615)::text::xid8;
  v_rows bigint; v_claims text; v_moved boolean;
begin
  select c.relname into v_leaf from pg_catalog.pg_class c where c.oid = p_leaves[1];
  select array_agg(pg_relation_filenode(l) order by n)
         || (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
    into v_files from unnest(p_leaves) with ordinality u(l, n);
  select r.* into h from tallybook.history_range r where r.leaf = v_leaf;
  -- what came from another cluster was reached
  if h.leaf is null or h.files <> v_files or h.quiet_since is not null and not v_quiet then
    delete from tallybook.history_range r where r.leaf = v_leaf;
    insert into tallybook.history_range (leaf, files, begun_at) values (v_leaf, v_files, p_at) returning * into h;
  elsif h.begun_at > p_at then  -- the clock was set back
    update tallybook.history_range r set begun_at = p_at where r.leaf = v_leaf;
  end if;
  if not v_quiet then
    return case when p_upper <= pg_snapshot_xmax(pg_current_snapshot())::text::numeric
                then tallybook._range_held(p_leaves[1], 'an open transaction') end;
  end if;
  if h.quiet_since is null then
    update tallybook.history_range r set quiet_since = p_at, held = null where r.leaf = v_leaf returning * into h;
  end if;
  if p_code is null then
    if p_at - h.quiet_since < p_keep then return null; end if;
  else
    if tallybook._range_young(p_leaves, h, p_at - p_keep) or h.again_at > p_at then return null; end if;
    if not h.complete then return case when tallybook._range_count(h, p_leaves, p_keep, p_at) then 0 end; end if;
    v_claims := tallybook._range_claims(h, p_code, v_lower, v_upper);
    if v_claims <> 'over' then return case when v_claims = 'more' then 0 end; end if;
    if tallybook._range_awaited(p_code, v_lower, v_upper) then
      return tallybook._range_held(p_leaves[1], 'jobs that wait for a job in this range');
    end if;
    v_moved := tallybook._range_heads(p_code, v_lower, v_upper);
    if v_moved then return 0; end if;
    if not v_moved then return tallybook._range_held(p_leaves[1], 'a claim that is not committed'); end if;
  end if;
  if p_upper <= pg_snapshot_xmin(pg_current_snapshot())::text::numeric and not tallybook._folded(v_upper) then
    return tallybook._range_held(p_leaves[1], 'the counters are behind');
  end if;
  v_rows := case when p_code is null then (select sum(pg_relation_size(l)) from unnest(p_leaves) l) / 8192
    else h.entries end;

  -- Its holders have ended, which cannot be seen without their outcomes.
  delete from tallybook.concurrency_holder c where c.ctid = any (array(
    select x.ctid from tallybook.concurrency_holder x where x.retention = p_code and x.xid >= v_lower
           and x.xid < v_upper for update skip locked));
  if exists (select from tallybook.concurrency_holder x where x.retention = p_code and x.xid >= v_lower
             and x.xid < v_upper) then
    return tallybook._range_held(p_leaves[1], 'a locked permit');
  end if;
  begin  -- the errors first, beside everybody; and not where the range stays
    perform tallybook._errors_keep(p_code, p_keep, v_lower, v_upper, p_at);
    if not tallybook._range_lock(p_leaves) then raise lock_not_available; end if;
  exception when lock_not_available then
    return tallybook._range_held(p_leaves[1], 'a reader');
  end;
  if not tallybook._range_quiet(p_lower, p_upper) then return null; end if;
  -- A producer may have found a parent here before it was locked.
  if tallybook._range_awaited(p_code, v_lower, v_upper) then return null; end if;
  execute (select 'truncate ' || string_agg(format('only %s', l), ', ') from unnest(p_leaves) l);
  if h.entries > 0 then
    insert into tallybook.pruned (retention, pruned_at, lower, upper, entries, ended)
    values (p_code, p_at, v_lower, p_upper::text::xid8, h.entries, h.states);
  end if;
  delete from tallybook.history_range r where r.leaf = v_leaf;
  return v_rows;
end $$;

-- _range_awaited(class, lower, upper): whether a child waits for the end of a job in this range.
create or replace function tallybook._range_awaited(p_code "char", p_lower xid8, p_upper xid8) returns boolean
language sql volatile as $$
  select exists (select from tallybook.parent p where p.ended_as is null and exists (
                   select from tallybook.entry e where e.job_id = p.parent_id and e.retention = p_code
                          and e.xid >= p_lower and e.xid < p_upper))
$$;

-- _range_quiet(lower, upper): whether no transaction can write to this range any more, or none could so far: then what
-- it holds came from another cluster.
create or replace function tallybook._range_quiet(p_lower numeric, p_upper numeric) returns boolean
language sql stable as $$
  select coalesce(p_upper <= pg_snapshot_xmin(pg_current_snapshot())::text::numeric, false)
      or p_lower > pg_snapshot_xmax(pg_current_snapshot())::text::numeric
$$;

-- _range_held(leaf, why): record for people why a range was not dropped or cut. Returns null, for its caller to return.
create or replace function tallybook._range_held(p_leaf regclass, p_why text) returns bigint
language sql as $$
  update tallybook.history_range r set held = p_why
    from pg_catalog.pg_class c where c.oid = p_leaf and r.leaf = c.relname and r.held is distinct from p_why;
  select null::bigint
$$;

-- _range_young(leaves, what is known, since): whether something in a range has ended, or was claimed, since then. If it
-- has not been counted yet, the last pages are read, because rows are roughly in the order of time.
-- profile: nojit
create or replace function tallybook._range_young(p_leaves regclass[], h tallybook.history_range,
  p_since timestamptz) returns boolean
language plpgsql
set enable_seqscan = off  -- the newest row by its index
as $$
declare v_end timestamptz := h.newest_end; v_claimed timestamptz;
begin
  if not h.complete then
    execute format('select max(o.ended_at) from %s o where o.ctid >= %L::tid', p_leaves[3],
                   format('(%s,0)', greatest(tallybook._blocks(p_leaves[3]) - 8, 0))) into v_end;
  end if;
  execute format('select max(c.claimed_at) from %s c where c.ctid >= %L::tid', p_leaves[2],
                 format('(%s,0)', greatest(tallybook._blocks(p_leaves[2]) - 8, 0))) into v_claimed;
  return coalesce(greatest(v_end, v_claimed) > p_since, false);
end $$;

-- _blocks(table): how many pages it has.
create or replace function tallybook._blocks(p_table regclass) returns bigint
language sql volatile as $$ select pg_relation_size(p_table) / current_setting('block_size')::bigint $$;

-- _range_count(what is known, leaves, keep, at): count the next pages of a range; whether there is more to do at once.
--
-- An outcome that comes while this counts can be missed, but is never counted twice. So if there are as many outcomes
-- as entries, nothing is open. If there are fewer, the outcomes are counted again after a twentieth of keep.
-- profile: nojit
create or replace function tallybook._range_count(h tallybook.history_range, p_leaves regclass[], p_keep interval,
  p_at timestamptz) returns boolean
language plpgsql
set enable_seqscan = off set max_parallel_workers_per_gather = 0  -- the user's queries need those
as $$
declare c_pages constant bigint := 32000; v_n bigint; v_states jsonb; v_newest timestamptz;
begin
  if h.entries_to < tallybook._blocks(p_leaves[1]) then
    execute format('select count(*) from %s e where e.ctid >= %L::tid and e.ctid < %L::tid', p_leaves[1],
                   format('(%s,0)', h.entries_to), format('(%s,0)', h.entries_to + c_pages)) into v_n;
    update tallybook.history_range r set entries = r.entries + v_n, entries_to = r.entries_to + c_pages
      where r.leaf = h.leaf;
    return true;
  end if;
  if h.outcomes_to < tallybook._blocks(p_leaves[3]) then
    execute format('select sum(n)::bigint, jsonb_object_agg(state, n), max(newest) from (
                      select o.state, count(*) as n, max(o.ended_at) as newest from %s o where o.ctid >= %L::tid
                             and o.ctid < %L::tid group by 1) s',
                   p_leaves[3], format('(%s,0)', h.outcomes_to), format('(%s,0)', h.outcomes_to + c_pages)) into v_n,
                   v_states, v_newest;
    update tallybook.history_range r
       set outcomes = r.outcomes + coalesce(v_n, 0), outcomes_to = r.outcomes_to + c_pages,
           newest_end = greatest(r.newest_end, v_newest),
           states = (select coalesce(jsonb_object_agg(k.key, k.n), '{}') from (
                       select s.key, sum(s.value::bigint) as n
                         from (select * from jsonb_each_text(r.states) union all select *
                               from jsonb_each_text(v_states)) s group by 1) k)
     where r.leaf = h.leaf;
    return true;
  end if;
  if h.entries = h.outcomes then
    update tallybook.history_range r set complete = true, open = 0, held = null, again_at = null where r.leaf = h.leaf;
    return true;
  end if;
  update tallybook.history_range r
     set open = r.entries - r.outcomes, held = 'open jobs', outcomes_to = 0, outcomes = 0, states = '{}',
         again_at = p_at + least(greatest(p_keep / 20, interval '1 minute'), interval '1 hour')
   where r.leaf = h.leaf;
  return false;
end $$;

-- _range_claims(what is known, class, lower, upper): whether all attempts that were claimed in a range have ended, in
-- whatever range their entries are. Returns over: they have; open: one has not; more: call again, not all were checked.
-- profile: hot
create or replace function tallybook._range_claims(h tallybook.history_range, p_code "char", p_lower xid8,
  p_upper xid8) returns text language plpgsql as $$
declare c_batch constant int := 500; w record; c tallybook.claim; v_n int; v_open boolean;
begin
  for w in select k.id, greatest(k.open_from, (h.checked ->> k.id::text)::bigint + 1) as first
             from tallybook.worker k where k.ended_at is null order by k.id loop
    v_n := 0;
    for c in select k.* from tallybook.claim k
              where k.worker_id = w.id and k.id >= w.first and k.retention = p_code and k.xid >= p_lower
                    and k.xid < p_upper
              order by k.id limit c_batch loop
      v_n := v_n + 1; v_open := exists (select from tallybook._open_attempts(c.worker_id, c.id, c.id));
      if v_open or v_n = c_batch then
        update tallybook.history_range r
           set checked = r.checked || jsonb_build_object(w.id, c.id - v_open::int),
               held = case when v_open then 'open jobs' else r.held end
         where r.leaf = h.leaf;
        return case when v_open then 'open' else 'more' end;
      end if;
    end loop;
  end loop;
  return 'over';
end $$;

-- _range_heads(class, lower, upper): move the cursors of lanes out of a range: append a claim of nothing with the same
-- cursor.
-- True: one was moved. Its lane is locked until the commit, so a later run drops the range. False: other sessions have
-- locked all these lanes; null: there is none. one_xid keeps the copy out of the indexes for the claim of an entry.
-- profile: hot
create or replace function tallybook._range_heads(p_code "char", p_lower xid8, p_upper xid8) returns boolean
language plpgsql as $$
declare v_lanes int[]; v_lane int; v_moved boolean;
begin
  v_lanes := array(
    select l.lane_id from tallybook.lane l, lateral (
             select c.xid from tallybook.claim c where c.lane_id = l.lane_id and c.retention = p_code
                    order by c.number desc limit 1) c
     where l.retention = p_code and c.xid >= p_lower and c.xid < p_upper limit 500);
  foreach v_lane in array v_lanes loop
    v_moved := coalesce(v_moved, false);
    continue when not pg_try_advisory_xact_lock(1413565441, v_lane);
    insert into tallybook.claim (id, number, lo, hi, from_xid, from_seq, pos_xid, pos_seq, one_xid, one_seq, claimed,
                                 claimed_at, lane_id, jobs, retention, holes, closed)
    select nextval('tallybook.claim_id'), c.number + 1, c.lo, c.hi, c.pos_xid, c.pos_seq, c.pos_xid, c.pos_seq, '0', 0,
           c.claimed, c.claimed_at, c.lane_id, 0, c.retention, c.holes, c.closed
      from (select k.* from tallybook.claim k where k.lane_id = v_lane and k.retention = p_code order by k.number desc
            limit 1) c
     where c.xid >= p_lower and c.xid < p_upper;
    v_moved := true;
  end loop;
  return v_moved;
end $$;

-- _errors_keep(class, keep, lower, upper, at): copy failures out of a range that is about to be dropped: those of
-- queues whose error_retention is longer than the range was kept. Without such a queue it reads no ledger.
-- profile: nested
create or replace function tallybook._errors_keep(p_code "char", p_keep interval, p_lower xid8, p_upper xid8,
  p_at timestamptz) returns void language plpgsql as $$
begin
  if not exists (select from tallybook.queue q where q.error_retention > p_keep) then return; end if;
  insert into tallybook.error_kept (ended_at, state, queue, task, subject, job_id, attempt, error)
  select o.ended_at, o.state, q.name, e.task, case when e.options ? 'subject' then e.unique_key end, o.job_id,
         e.attempt, o.error
    from tallybook.outcome o
    join lateral (select x.task, x.options, x.unique_key, x.attempt, x.lane_id from tallybook.entry x
                   where x.job_id = o.job_id and x.retention = p_code and x.xid = o.entry_xid and x.seq = o.entry_seq
                   limit 1) e on true
    join tallybook.lane l on l.lane_id = e.lane_id
    join tallybook.queue q on q.name = l.queue and q.error_retention > p_at - o.ended_at
   where o.retention = p_code and o.entry_xid >= p_lower and o.entry_xid < p_upper and o.state <> 'completed'
     and o.state in ('failed', 'dead', 'lost');
end $$;
