-- _claim_of(lane, retention, xid, seq): which worker claimed an entry, and when; no row if no claim has it.
--
-- Claims of windows are in order, so only the first claim whose position is not before the entry can have it. Claims of
-- former holes can overlap; few lie between a hole and the claim that took it.
-- One row at most, which the planner has to be told: with its usual guess of 1,000 it compiles the view of jobs by JIT.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook._claim_of(p_lane_id int, p_retention "char", p_xid xid8, p_seq bigint)
returns table (worker_id int, claimed_at timestamptz) language plpgsql stable rows 1 as $$
#variable_conflict use_column
begin
  return query
  select c.worker_id, c.claimed_at from (
    select * from tallybook.claim c
     where c.lane_id = p_lane_id and c.retention = p_retention and c.one_xid is null and c.closed = '{}'
       and (c.pos_xid, c.pos_seq) >= (p_xid, p_seq)
     order by c.pos_xid, c.pos_seq limit 1) c
   where (c.from_xid, c.from_seq) < (p_xid, p_seq) and p_xid <> all (c.holes) and p_seq <> all (c.skipped);
  if found then return; end if;
  return query
  select c.worker_id, c.claimed_at from tallybook.claim c
   where c.retention = p_retention and c.one_xid is not null and c.one_xid = p_xid and c.one_seq = p_seq;
  if found then return; end if;
  return query
  select c.worker_id, c.claimed_at from tallybook.claim c
   where c.lane_id = p_lane_id and c.retention = p_retention and c.one_xid is null and c.closed <> '{}'
     and (c.pos_xid, c.pos_seq) >= (p_xid, p_seq)
     and (c.from_xid, c.from_seq) < (p_xid, p_seq) and p_xid = any (c.closed) and p_seq <> all (c.skipped)
   order by c.pos_xid, c.pos_seq limit 1;
end $$;
