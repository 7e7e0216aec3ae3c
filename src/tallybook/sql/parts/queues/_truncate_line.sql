-- _truncate_line(lane, retention, xids, seqs, error, at): record these entries of a lane as cancelled, except those
-- that ended otherwise.
--
-- _take calls it under the lane's lock with the entries that it would have claimed. skipped: entries that were claimed
-- by id, moved, or cancelled by a person, whose reason stays (see _skip). The lines of order keys continue if that
-- needs no wait; rescue does the rest. Writes outcome; deletes from tombstone, order_line; see _release.
-- profile: nested
create or replace function tallybook._truncate_line(p_lane_id int, p_retention "char", p_xids xid8[], p_seqs bigint[],
  p_error jsonb, p_at timestamptz, out ended int, out skipped bigint[]) language plpgsql as $$
declare
  v_ordered bigint[]; v_keys text[];
  v_parents boolean := exists (select from tallybook.parent p where p.ended_as is null);
begin
  skipped := '{}';
  if exists (select from tallybook.tombstone) then
    skipped := tallybook._skip(p_lane_id, p_retention, p_xids, p_seqs, p_at);
  end if;
  with met as materialized (
    select e.xid, e.seq, e.job_id, e.attempt, e.task, e.order_key
      from unnest(p_xids, p_seqs) f(xid, seq), lateral (
        select x.xid, x.seq, x.job_id, x.attempt, x.task, x.order_key from tallybook.entry x
         where x.lane_id = p_lane_id and x.retention = p_retention and x.xid = f.xid and x.seq = f.seq limit 1) e
     where skipped = '{}' or e.seq <> all (skipped)
  ), gone as (  -- plain: any other end of an unclaimed job leaves a tombstone, and is skipped
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
    select m.xid, m.seq, m.job_id, p_at, p_retention, 'cancelled', p_error from met m order by m.job_id
  ), told as (
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    select p_lane_id, count(*), sum(m.attempt), w.what, m.task
      from met m, unnest('{cancelled,unclaimed}'::tallybook.counted[]) w(what) group by w.what, m.task)
  select count(*), array_agg(m.job_id) filter (where m.order_key is not null),
         array_agg(distinct m.order_key) filter (where m.order_key is not null),
         v_parents and exists (select from met n join tallybook.parent p on p.parent_id = n.job_id
                               and p.ended_as is null)
    into ended, v_ordered, v_keys, v_parents from met m;
  if v_ordered is not null then perform tallybook._leave_lines(v_ordered, v_keys, p_at); end if;
  if v_parents then perform tallybook._wake(' parents_resolve'); end if;
end $$;
