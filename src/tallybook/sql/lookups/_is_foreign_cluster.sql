-- _is_foreign_cluster(cursors): whether this database was written by another cluster than the current one.
--
-- Compares the cluster's own number. cursors: also looks for a lane whose cursor is ahead of its next transaction id,
-- which cannot be in one cluster, for data that came without the row in installation; that costs 10 us a lane. Needs no
-- privilege.
-- Reads installation, lane, claim.
-- profile: hot
create or replace function tallybook._is_foreign_cluster(p_cursors boolean) returns boolean
language plpgsql stable
set enable_nestloop = on  -- also where the caller has it off
as $$
declare v_next xid8 := pg_snapshot_xmax(pg_current_snapshot());
begin
  if (select i.system_identifier from tallybook.installation i)
     <> (select s.system_identifier from pg_control_system() s) then return true; end if;
  if not p_cursors then return false; end if;  -- before the query, which need not be planned then
  return exists (
    select from tallybook.lane l
      left join lateral (select c.hi from tallybook.claim c
                          where c.lane_id = l.lane_id and c.retention = l.retention order by c.number desc
                                limit 1) h on true
     where l.retired_at is null and greatest(l.born, h.hi) > v_next);
end $$;
