-- prune(at, as_service): let history go that is past its retention, a little at each call: see docs/history.md. A
-- service.
--
-- Of all that is to be done it does one piece: counts some pages of a range, moves lanes' cursors out of it, drops it,
-- makes a step towards a new range, or else sweeps a batch of each small table. Call it again while it says so. Nobody
-- waits for it for longer than 20 ms: what somebody holds is tried again by a later run.
-- One at a time, whoever calls it: two that count the same pages of a range would add them up twice, and take what is
-- open for ended.
--   as_service  claim the run first, and put it on record (see _service.sql)
-- Returns effect: how many rows went, null where somebody else is running it, and again: whether there is more to do at
-- once.
-- Needs READ COMMITTED (TB003).
-- Reads and writes: see _prune_range, _ranges_kept, _sweep; service.
-- rights: worker
create or replace function tallybook.prune(at timestamptz default clock_timestamp(), as_service boolean default false,
  out effect bigint, out again boolean)
language plpgsql as $$
declare
  v_names text[]; v_codes "char"[]; v_parents jsonb; v_keeps interval[]; v_ranges jsonb; v_range jsonb;
  v_family regclass[];
  v_piece bigint;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'prune needs READ COMMITTED' using errcode = 'TB003',
      hint = 'An older snapshot does not know what is open.';
  end if;
  again := false;
  if as_service and not tallybook._service_claim('prune', at) then return; end if;
  if not pg_try_advisory_xact_lock(1413565449, hashtext('prune: one at a time')) then return; end if;
  effect := 0;
  -- Into arrays: no query may be open on what is changed.
  select array_agg(f.name order by f.name), array_agg(f.code order by f.name),
         jsonb_agg(to_jsonb(f.parents::oid[]::bigint[]) order by f.name), array_agg(f.keep order by f.name)
    into v_names, v_codes, v_parents, v_keeps from tallybook._families() f;
  <<pieces>>
  for n in 1..cardinality(v_names) loop
    v_family := array(select x::oid::regclass from jsonb_array_elements_text(v_parents -> n - 1) with ordinality u(x, i)
                      order by i);
    select coalesce(jsonb_agg(jsonb_build_array(r.lower, r.upper, r.leaves::oid[]::bigint[]) order by r.lower), '[]')
           into v_ranges
      from tallybook._family_ranges(v_family) r where r.bytes > 0;
    for i in 0..jsonb_array_length(v_ranges) - 1 loop
      v_range := v_ranges -> i;
      v_piece := tallybook._prune_range(v_codes[n], v_keeps[n], (v_range ->> 0)::numeric, (v_range ->> 1)::numeric,
        array(select x::oid::regclass from jsonb_array_elements_text(v_range -> 2) with ordinality u(x, k) order by k),
        at);
      if v_piece is not null then
        effect := v_piece; again := true;
        exit pieces;
      end if;
    end loop;
  end loop;
  if not again then
    for n in 1..cardinality(v_names) loop
      v_family := array(select x::oid::regclass from jsonb_array_elements_text(v_parents -> n - 1) with ordinality u(x,
          i) order by i);
      again := tallybook._ranges_kept(v_family, v_keeps[n], at);
      exit when again;
    end loop;
  end if;
  if not again then
    select s.swept, s.more into effect, again from tallybook._sweep(at) s;
  end if;
  if as_service then perform tallybook._service_ran('prune', at, effect); end if;
end $$;
