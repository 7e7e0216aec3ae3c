-- prune(at, as_service): delete history whose retention has passed, one small step per call. A service.
-- See https://github.com/tallybook/tallybook/blob/main/docs/history.md.
--
-- Each call does one step: count some pages of a range, move lanes' cursors out of it, drop it, prepare a new range, or
-- sweep a batch of each small table. Call it again while `again` is true. Nothing waits for it for longer than 20 ms; a
-- locked table is tried again by a later run.
-- Only one run at a time: two runs that count the same pages would add them twice, and mistake open jobs for ended
-- ones.
--   as_service  claim the run first, and record it (see _service.sql)
-- Returns effect: the number of deleted rows, null if another session runs it, and again: whether there is more to do
-- now.
-- Needs READ COMMITTED (TB003).
-- Reads and writes: see _prune_range, _ranges_kept, _sweep; service.
-- rights: worker
create or replace function tallybook.prune(at timestamptz default clock_timestamp(), as_service boolean default false,
  out effect bigint, out again boolean)
language plpgsql as $$
declare r record;
begin
  perform tallybook._read_committed('prune needs READ COMMITTED',
                                    'An older snapshot does not show which jobs are open.');
  again := false;
  if as_service and not tallybook._service_claim('prune', at) then return; end if;
  if not pg_try_advisory_xact_lock(1413565449, hashtext('prune: one at a time')) then return; end if;
  for r in select f.code, f.keep, x.* from tallybook._families() f, lateral tallybook._family_ranges(f.parents) x
            where x.bytes > 0 order by f.name, x.lower loop
    effect := tallybook._prune_range(r.code, r.keep, r.lower, r.upper, r.leaves, at);
    again := effect is not null;
    exit when again;
  end loop;
  effect := coalesce(effect, 0);
  for r in select x.* from tallybook._families() x where not again order by x.name loop
    again := tallybook._ranges_kept(r.parents, r.keep, at);
    exit when again;
  end loop;
  if not again then select s.swept, s.more into effect, again from tallybook._sweep(at) s; end if;
  if as_service then perform tallybook._service_ran('prune', at, effect); end if;
end $$;
