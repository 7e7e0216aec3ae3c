-- prune(at, as_service): let history go that is past its retention, a little at each call. A service.
-- See https://github.com/tallybook/tallybook/blob/main/docs/history.md.
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
  f record; r record; v_piece bigint;
begin
  perform tallybook._read_committed('prune needs READ COMMITTED',
                                    'An older snapshot does not know what is open.');
  again := false;
  if as_service and not tallybook._service_claim('prune', at) then return; end if;
  if not pg_try_advisory_xact_lock(1413565449, hashtext('prune: one at a time')) then return; end if;
  effect := 0;
  <<pieces>>
  for f in select x.* from tallybook._families() x order by x.name loop
    for r in select x.* from tallybook._family_ranges(f.parents) x where x.bytes > 0 order by x.lower loop
      v_piece := tallybook._prune_range(f.code, f.keep, r.lower, r.upper, r.leaves, at);
      again := v_piece is not null;
      if again then
        effect := v_piece;
        exit pieces;
      end if;
    end loop;
  end loop;
  for f in select x.* from tallybook._families() x where not again order by x.name loop
    again := tallybook._ranges_kept(f.parents, f.keep, at);
    exit when again;
  end loop;
  if not again then
    select s.swept, s.more into effect, again from tallybook._sweep(at) s;
  end if;
  if as_service then perform tallybook._service_ran('prune', at, effect); end if;
end $$;
