-- _families(): what is kept in ranges of transaction ids: the three ledgers of each retention class, whose ranges are the same, and tally.
-- The first table of a family gives its ranges their name.
create or replace function tallybook._families() returns table (name text, code "char", parents regclass[], keep interval)
language sql stable as $$
  select r.name, r.code, array[to_regclass('tallybook.entry_' || r.name), to_regclass('tallybook.claim_' || r.name),
                               to_regclass('tallybook.outcome_' || r.name)], r.keep
    from tallybook.retention_class r where r.code is not null
  union all
  select 'tally', null, array[c.oid::regclass], interval '1 hour'
    from pg_catalog.pg_class c where c.oid = to_regclass('tallybook.tally') and c.relkind = 'p'
$$;

-- _ranges(table): its partitions with their bounds, as numbers: lower <= xid < upper. 0: MINVALUE; null: MAXVALUE.
create or replace function tallybook._ranges(p_parent regclass) returns table (leaf regclass, lower numeric, upper numeric)
language sql stable as $$
  select c.oid::regclass, coalesce(m.b[1], '0')::numeric, m.b[2]::numeric
    from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid,
         lateral regexp_match(pg_get_expr(c.relpartbound, c.oid),
                              '^FOR VALUES FROM \((?:MINVALUE|''(\d+)'')\) TO \((?:MAXVALUE|''(\d+)'')\)$') m(b)
   where i.inhparent = p_parent
   order by 2
$$;

-- _range_leaves(parents, lower): the partitions of a family that begin at lower, in the family's order.
create or replace function tallybook._range_leaves(p_parents regclass[], p_lower numeric) returns regclass[]
language sql stable as $$
  select array_agg(r.leaf order by p.n)
    from unnest(p_parents) with ordinality p(parent, n), lateral tallybook._ranges(p.parent) r where r.lower = p_lower
$$;

-- _family_ranges(parents): the ranges of a family: their bounds, their partitions in the family's order, and how large these are.
create or replace function tallybook._family_ranges(p_parents regclass[]) returns table (lower numeric, upper numeric, leaves regclass[], bytes bigint)
language sql stable as $$
  select r.lower, min(r.upper), array_agg(r.leaf order by p.n), sum(pg_relation_size(r.leaf))::bigint
    from unnest(p_parents) with ordinality p(parent, n), lateral tallybook._ranges(p.parent) r group by r.lower order by r.lower
$$;

-- _range_lock(tables): takes these tables alone. Never waits; it is tried some times, since most that hold them do so for a
-- moment. False: somebody holds one for longer, a dump or an open transaction: try again later.
create or replace function tallybook._range_lock(p_tables regclass[]) returns boolean
language plpgsql as $$
begin
  for try in 1..20 loop
    begin
      execute (select 'lock table ' || string_agg(format('only %s', t), ', ' order by n) || ' in access exclusive mode nowait'
                 from unnest(p_tables) with ordinality u(t, n));
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

-- _range_split(parents, lower, at): cut the range that begins at lower in two, in all tables of a family. What it holds lies below the cut.
--
-- Only where that is a matter of milliseconds: what was written to it (16 MB at most) is read again under the lock, to see that it
-- fits. False: it is larger, holds something behind the cut, or somebody uses the tables.
create or replace function tallybook._range_split(p_parents regclass[], p_lower numeric, p_cut numeric) returns boolean
language plpgsql as $$
declare
  c_small constant bigint := 16777216;
  v_leaves regclass[] := tallybook._range_leaves(p_parents, p_lower); v_upper numeric; v_name name; v_new regclass[] := '{}'; v_behind boolean; v_key name;
begin
  if p_cut >= (select r.upper from tallybook._ranges(p_parents[1]) r where r.lower = p_lower) then return false; end if;
  for n in 1..cardinality(p_parents) loop
    if pg_relation_size(v_leaves[n]) > c_small then return false; end if;
    select a.attname into v_key from pg_catalog.pg_partitioned_table p join pg_catalog.pg_attribute a on a.attrelid = p.partrelid and a.attnum = p.partattrs[0]
     where p.partrelid = p_parents[n];
    execute format('select exists (select from %s where %I >= %L)', v_leaves[n], v_key, p_cut) into v_behind;
    if v_behind then return false; end if;
  end loop;
  -- What takes long is done before anything is locked. In a block, so that nothing of it stays where the locks are not to be had.
  begin
    for n in 1..cardinality(p_parents) loop
      select c.relname || '_' || (
               select coalesce(max(substring(k.relname from '_(\d+)$')::int), 0) + 1
                 from pg_catalog.pg_inherits i join pg_catalog.pg_class k on k.oid = i.inhrelid where i.inhparent = p_parents[n])
        into v_name from pg_catalog.pg_class c where c.oid = p_parents[n];
      execute format('create table tallybook.%I (like %s including all)', v_name, p_parents[n]);
      v_new := v_new || format('tallybook.%I', v_name)::regclass;
    end loop;
    if not tallybook._range_lock(p_parents || v_leaves) or p_cut <= pg_snapshot_xmax(pg_current_snapshot())::text::numeric then
      raise lock_not_available;
    end if;
    select r.upper into v_upper from tallybook._ranges(p_parents[1]) r where r.lower = p_lower;
    for n in 1..cardinality(p_parents) loop
      execute format('alter table %s detach partition %s', p_parents[n], v_leaves[n]);
      execute format('alter table %s attach partition %s for values %s', p_parents[n], v_leaves[n],
                     tallybook._range_bounds(p_lower, p_cut));
      execute format('alter table %s attach partition %s for values %s', p_parents[n], v_new[n],
                     tallybook._range_bounds(p_cut, v_upper));
    end loop;
    return true;
  exception when lock_not_available or check_violation then
    return false;
  end;
end $$;

-- _range_merge(parents, lower, next): two neighbouring ranges in which nothing is become one, or nothing is done (false).
create or replace function tallybook._range_merge(p_parents regclass[], p_lower numeric, p_next numeric) returns boolean
language plpgsql as $$
declare
  v_first regclass[] := tallybook._range_leaves(p_parents, p_lower); v_second regclass[] := tallybook._range_leaves(p_parents, p_next);
  v_upper numeric;
begin
  if not tallybook._range_lock(p_parents || v_first || v_second) then return false; end if;
  if exists (select from unnest(v_first || v_second) l where pg_relation_size(l) > 0) then return false; end if;
  for n in 1..cardinality(p_parents) loop
    select r.upper into v_upper from tallybook._ranges(p_parents[n]) r where r.lower = p_next;
    execute format('alter table %s detach partition %s', p_parents[n], v_first[n]);
    execute format('alter table %s detach partition %s', p_parents[n], v_second[n]);
    execute format('drop table %s', v_second[n]);
    execute format('alter table %s attach partition %s for values %s', p_parents[n], v_first[n],
                   tallybook._range_bounds(p_lower, v_upper));
  end loop;
  return true;
end $$;

-- _ranges_ahead(parents, step): one change, where one is needed, so that two ranges of about step transaction ids follow the one
-- that is being written. True: something was changed; there may be more to do.
--
-- Ahead of these is a long range, and at the end the one up to MAXVALUE: where no worker has run for long, or none got the locks, it
-- is the long one that is written, and cut again while it is small. At most 16 ranges: from 12 on old empty ones are merged first.
create or replace function tallybook._ranges_ahead(p_parents regclass[], p_step numeric) returns boolean
language plpgsql as $$
declare
  c_most constant int := 16;
  v_cur numeric := pg_snapshot_xmax(pg_current_snapshot())::text::numeric; v_old numeric := pg_snapshot_xmin(pg_current_snapshot())::text::numeric;
  v_lower numeric[]; v_upper numeric[]; v_empty boolean[]; k int; j int; v_cut numeric;
begin
  select array_agg(r.lower order by r.lower), array_agg(r.upper order by r.lower), array_agg(r.bytes = 0 order by r.lower)
    into v_lower, v_upper, v_empty from tallybook._family_ranges(p_parents) r;
  select max(n) into k from unnest(v_lower) with ordinality u(l, n) where l <= v_cur;
  if cardinality(v_lower) >= c_most - 4 then
    for i in 1..k - 2 loop
      if v_empty[i] and v_empty[i + 1] and v_upper[i + 1] <= v_old then
        return tallybook._range_merge(p_parents, v_lower[i], v_lower[i + 1]);
      end if;
    end loop;
  end if;
  if cardinality(v_lower) >= c_most then return false; end if;
  if v_upper[k] is null or v_upper[k] - v_cur > 4 * p_step then
    return tallybook._range_split(p_parents, v_lower[k], v_cur + p_step);
  end if;
  j := k + 1;
  while j <= k + 2 and v_upper[j] - v_lower[j] <= 4 * p_step loop j := j + 1; end loop;
  if j > k + 2 then return false; end if;
  v_cut := v_lower[j] + case when v_upper[j] is null then greatest(100000000, 64 * p_step) else p_step end;
  return tallybook._range_split(p_parents, v_lower[j], v_cut);
end $$;

-- _xid_rate(at): how many transaction ids the cluster gives out a second; null until that is known. Measured once a minute,
-- over about an hour. Writes xid_rate.
create or replace function tallybook._xid_rate(p_at timestamptz) returns float8
language plpgsql as $$
declare
  r tallybook.xid_rate; v_cur xid8 := pg_snapshot_xmax(pg_current_snapshot()); v_seconds float8; v_share float8;
begin
  select x.* into r from tallybook.xid_rate x;
  if not found or r.xid > v_cur or r.measured_at > p_at then  -- another cluster, another clock
    insert into tallybook.xid_rate (measured_at, xid) values (p_at, v_cur)
    on conflict (one) do update set measured_at = p_at, xid = v_cur, per_second = null;
    return null;
  end if;
  v_seconds := extract(epoch from p_at - r.measured_at);
  if v_seconds < 60 then return r.per_second; end if;
  v_share := case when r.per_second is null then 1 else 1 - exp(-least(v_seconds / 3600, 50)) end;
  r.per_second := coalesce(r.per_second, 0) * (1 - v_share) + (v_cur::text::numeric - r.xid::text::numeric) / v_seconds * v_share;
  update tallybook.xid_rate set measured_at = p_at, xid = v_cur, per_second = r.per_second;
  return r.per_second;
end $$;
