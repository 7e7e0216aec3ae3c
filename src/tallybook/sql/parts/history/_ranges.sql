-- _families(): what is kept in ranges of transaction ids: the three ledgers of each retention class, whose ranges are
-- the same, and tally.
-- The first table of a family gives its ranges their name.
create or replace function tallybook._families() returns table (name text, code "char", parents regclass[],
  keep interval)
language sql stable as $$
  select r.name, r.code, array[to_regclass('tallybook.entry_' || r.name), to_regclass('tallybook.claim_' || r.name),
                               to_regclass('tallybook.outcome_' || r.name)], r.keep
    from tallybook.retention_class r where r.code is not null
  union all
  select 'tally', null, array[c.oid::regclass], interval '1 hour'
    from pg_catalog.pg_class c where c.oid = to_regclass('tallybook.tally') and c.relkind = 'p'
$$;

-- _ranges(table): its partitions with their bounds, as numbers: lower <= xid < upper. 0: MINVALUE; null: MAXVALUE.
create or replace function tallybook._ranges(p_parent regclass) returns table (leaf regclass, lower numeric,
  upper numeric)
language sql stable as $$
  select c.oid::regclass, coalesce(m.b[1], '0')::numeric, m.b[2]::numeric
    from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid,
         lateral regexp_match(pg_get_expr(c.relpartbound, c.oid),
                              E'^FOR VALUES FROM \\((?:MINVALUE|''(\\d+)'')\\) TO \\((?:MAXVALUE|''(\\d+)'')\\)$') m(b)
   where i.inhparent = p_parent
   order by 2
$$;

-- _family_ranges(parents): the ranges of a family: their bounds, their partitions in the family's order, and how large
-- these are.
create or replace function tallybook._family_ranges(p_parents regclass[]) returns table (lower numeric, upper numeric,
  leaves regclass[], bytes bigint)
language sql stable as $$
  select r.lower, min(r.upper), array_agg(r.leaf order by p.n), sum(pg_relation_size(r.leaf))::bigint
    from unnest(p_parents) with ordinality p(parent, n), lateral tallybook._ranges(p.parent) r group by r.lower
         order by r.lower
$$;

-- _range_lock(tables): lock these tables exclusively. False: another session, such as a dump or an open transaction,
-- holds one for longer: try again later.
--
-- The first 20 tries never wait. If short transactions follow one another without a gap, that is not enough, so the
-- last 5 wait for 1 ms a table, and other sessions wait behind them for as long.
create or replace function tallybook._range_lock(p_tables regclass[]) returns boolean
language plpgsql as $$
declare v_timeout text := current_setting('lock_timeout');
begin
  for try in 1..25 loop
    begin
      if try > 20 then perform set_config('lock_timeout', '1ms', true); end if;
      execute (select 'lock table ' || string_agg(format('only %s', t), ', ' order by n) || ' in access exclusive mode'
                 from unnest(p_tables) with ordinality u(t, n)) || case when try <= 20 then ' nowait' else '' end;
      perform set_config('lock_timeout', v_timeout, true);
      return true;
    exception when lock_not_available then
      perform pg_sleep(0.002);  -- nothing is locked meanwhile
    end;
  end loop;
  return false;
end $$;

-- _range_bounds(lower, upper): the bounds in words of a CREATE TABLE.
create or replace function tallybook._range_bounds(p_lower numeric, p_upper numeric) returns text
language sql immutable as $$
  select format('from (%s) to (%s)', case when p_lower = 0 then 'minvalue' else quote_literal(p_lower::text) end,
                coalesce(quote_literal(p_upper::text), 'maxvalue'))
$$;

-- _range_cut(): in the session that cuts a range, the upper bound that this range will get. In all others no bound.
--
-- Marked immutable, although it reads a setting, so that PostgreSQL inserts its value when it compares a CHECK
-- constraint that calls it with the new bounds of a partition: see _range_split.
create or replace function tallybook._range_cut() returns xid8
language sql immutable as $$
  select coalesce(nullif(current_setting('tallybook.range_cut', true), ''), '18446744073709551615')::xid8
$$;

-- _range_split(parents, lower, cut): cut the range that begins at lower in two, in all tables of a family. All its rows
-- are below the cut. cut null: right above all transaction ids so far.
--
-- An attach reads the table under the lock to see that all rows fit, unless a valid CHECK constraint implies the
-- bounds. So a table of more than 1 MB gets one first, in transactions of their own: it is added without a look at the
-- rows, under a brief lock, and validated beside producers. Its upper bound is _range_cut(), which no row can violate:
-- no producer can meet an error.
-- In the cut's own transaction it is the cut. That all rows lie below that is known without reading them: the locks are
-- held, so every transaction that has written here has ended. Rows that came from another cluster are looked for.
-- True: a step was made; with the last one the range is cut. False: not now; held_ranges shows why.
create or replace function tallybook._range_split(p_parents regclass[], p_lower numeric,
  p_cut numeric default null) returns boolean
language plpgsql as $$
declare
  c_small constant bigint := 1048576; c_check constant name := 'what lies in a range that is being cut';
  v_leaves regclass[]; v_new regclass[] := '{}'; v_name name; v_large regclass[]; v_todo regclass[]; v_upper numeric;
  v_next numeric; v_cut numeric; v_why text := 'a reader';
begin
  select r.leaves, r.upper into v_leaves, v_upper from tallybook._family_ranges(p_parents) r where r.lower = p_lower;
  v_large := array(select l from unnest(v_leaves) l where pg_relation_size(l) > c_small);
  if v_large <> '{}' and tallybook._range_foreign(v_large) then
    return tallybook._range_held(v_leaves[1], 'jobs of another cluster') is not null;
  end if;

  v_todo := array(select l from unnest(v_large) l where not exists (
                    select from pg_catalog.pg_constraint c where c.conrelid = l and c.conname = c_check));
  if v_todo <> '{}' then
    if not tallybook._range_lock(v_todo) then raise lock_not_available; end if;
    execute (select string_agg(format('alter table only %s add constraint %I check (%s) not valid', l, c_check,
                                      concat_ws(' and ',
                                 pg_get_partition_constraintdef(i.inhparent), format('%I >= %L::xid8', k.key, p_lower),
                                 format('%I < tallybook._range_cut()', k.key))), '; ')
               from unnest(v_todo) l join pg_catalog.pg_inherits i on i.inhrelid = l,
                    lateral tallybook._range_key(l) k(key));
    return true;
  end if;
  v_todo := array(select c.conrelid::regclass from pg_catalog.pg_constraint c
                   where c.conrelid = any (v_large::oid[]) and c.conname = c_check and not c.convalidated);
  if v_todo <> '{}' then
    execute format('lock table only %s in share update exclusive mode nowait', v_todo[1]);
    execute format('alter table only %s validate constraint %I', v_todo[1], c_check);
    return true;
  end if;

  -- What takes long is done before anything is locked. Nothing of it stays where the locks are not to be had.
  for n in 1..cardinality(p_parents) loop
    select c.relname || '_' || (
             select coalesce(max(substring(k.relname from E'_(\\d+)$')::int), 0) + 1
               from pg_catalog.pg_inherits i join pg_catalog.pg_class k on k.oid = i.inhrelid
                    where i.inhparent = p_parents[n])
      into v_name from pg_catalog.pg_class c where c.oid = p_parents[n];
    execute format('create table tallybook.%I (like %s including all)', v_name, p_parents[n]);
    execute format('alter table tallybook.%I replica identity full', v_name);  -- LIKE leaves it out
    v_new := v_new || format('tallybook.%I', v_name)::regclass;
  end loop;
  if not tallybook._range_lock(p_parents || v_leaves) then raise lock_not_available; end if;
  v_next := greatest(pg_snapshot_xmax(pg_current_snapshot())::text::numeric, pg_current_xact_id()::text::numeric + 1);
  v_cut := coalesce(p_cut, v_next);
  if v_cut < v_next or v_cut >= v_upper then
    v_why := null;
    raise lock_not_available;
  end if;
  perform set_config('tallybook.range_cut', v_cut::text, true);
  for n in 1..cardinality(p_parents) loop
    execute format('alter table %s detach partition %s', p_parents[n], v_leaves[n]);
    execute format('alter table %s attach partition %s for values %s', p_parents[n], v_leaves[n],
                   tallybook._range_bounds(p_lower, v_cut));
    execute format('alter table %s attach partition %s for values %s', p_parents[n], v_new[n],
                   tallybook._range_bounds(v_cut, v_upper));
    if v_leaves[n] = any (v_large) then
      execute format('alter table only %s drop constraint %I', v_leaves[n], c_check);
    end if;
  end loop;
  perform set_config('tallybook.range_cut', '', true);
  -- nobody waits for the disk; what a crash takes back it takes back whole
  perform set_config('synchronous_commit', 'off', true);
  return true;
exception
  when lock_not_available then return tallybook._range_held(v_leaves[1], v_why) is not null;
  when check_violation then return tallybook._range_held(v_leaves[1], 'jobs of another cluster') is not null;
end $$;

-- _range_key(leaf): the column that its ranges go by.
create or replace function tallybook._range_key(p_leaf regclass) returns name
language sql stable as $$
  select a.attname from pg_catalog.pg_inherits i
    join pg_catalog.pg_partitioned_table p on p.partrelid = i.inhparent
    join pg_catalog.pg_attribute a on a.attrelid = p.partrelid and a.attnum = p.partattrs[0]
   where i.inhrelid = p_leaf
$$;

-- _range_foreign(leaves): whether they hold transaction ids that this cluster has not given out yet. Reads them only if
-- this database came from another cluster. Apart from its own transaction, a statement sees of this cluster only ids
-- below its snapshot's xmax.
-- profile: nojit
create or replace function tallybook._range_foreign(p_leaves regclass[]) returns boolean language plpgsql as $$
declare
  v_found boolean := tallybook._is_foreign_cluster(true)
                     or exists (select from tallybook.lane l where l.retired_at is not null);
begin
  if v_found then
    execute (select 'select ' || string_agg(format(
               'exists (select from %s where %2$I >= pg_snapshot_xmax(pg_current_snapshot())
                                         and %2$I is distinct from pg_current_xact_id_if_assigned())',
               l, tallybook._range_key(l)), ' or ') from unnest(p_leaves) l) into v_found;
  end if;
  return v_found;
end $$;

-- _range_merge(parents, lower, next): make one range of two empty neighbours. False: nothing was done, because one is
-- not empty or a table is locked.
create or replace function tallybook._range_merge(p_parents regclass[], p_lower numeric, p_next numeric) returns boolean
language plpgsql as $$
declare a record; b record;
begin
  select r.* into a from tallybook._family_ranges(p_parents) r where r.lower = p_lower;
  select r.* into b from tallybook._family_ranges(p_parents) r where r.lower = p_next;
  if not tallybook._range_lock(p_parents || a.leaves || b.leaves) then return false; end if;
  if exists (select from unnest(a.leaves || b.leaves) l where pg_relation_size(l) > 0) then return false; end if;
  for n in 1..cardinality(p_parents) loop
    execute format('alter table %s detach partition %s', p_parents[n], a.leaves[n]);
    execute format('alter table %s detach partition %s', p_parents[n], b.leaves[n]);
    execute format('drop table %s', b.leaves[n]);
    execute format('alter table %s attach partition %s for values %s', p_parents[n], a.leaves[n],
                   tallybook._range_bounds(p_lower, b.upper));
  end loop;
  return true;
end $$;

-- _ranges_kept(parents, keep, at): make one change, if one is needed, so that a class has about eight ranges. The range
-- that is being written is cut an eighth of keep after prune first found something in it. True: something was changed;
-- there may be more to do.
--
-- Ranges are cut by time, not by transaction ids: whatever the rate of these, no range holds more than was written in
-- that time.
-- At most 16 ranges: from 12 on old empty ones are merged first.
create or replace function tallybook._ranges_kept(p_parents regclass[], p_keep interval,
  p_at timestamptz) returns boolean
language plpgsql as $$
declare
  c_most constant int := 16; r record;
  v_cur numeric := pg_snapshot_xmax(pg_current_snapshot())::text::numeric;
  v_old numeric := pg_snapshot_xmin(pg_current_snapshot())::text::numeric;
begin
  for r in select x.lower, x.leaves, count(*) over () as ranges, lead(x.lower) over w as next,
                  x.bytes = 0 and lead(x.bytes) over w = 0 and lead(x.upper) over w <= v_old
                  and lead(x.lower, 2) over w <= v_cur as two_empty, coalesce(v_cur < x.upper, true) as current
             from tallybook._family_ranges(p_parents) x window w as (order by x.lower) order by x.lower loop
    if r.two_empty and r.ranges >= c_most - 4 then return tallybook._range_merge(p_parents, r.lower, r.next); end if;
    exit when r.current;
  end loop;
  if not exists (select from tallybook.history_range h join pg_catalog.pg_class c on c.relname = h.leaf
                  where c.oid = r.leaves[1] and h.begun_at <= p_at - p_keep / 8) then return false; end if;
  if r.ranges >= c_most then return tallybook._range_held(r.leaves[1], 'too many ranges') is not null; end if;
  return tallybook._range_split(p_parents, r.lower);
end $$;
