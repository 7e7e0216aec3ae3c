-- _truncate_line(lane, retention, xids, seqs, error, at): end these entries of a lane as cancelled, but for what is
-- another's already.
--
-- Called by _take under the lane's lock, with what it would have handed out. skipped: entries that were taken by their
-- id, moved, or cancelled by a person, whose word stays (see _skip). The lines of order keys go on where that takes no
-- wait; rescue mends the rest.
-- Writes outcome; deletes from tombstone, order_line; see _release.
create or replace function tallybook._truncate_line(p_lane_id int, p_retention "char", p_xids xid8[], p_seqs bigint[],
  p_error jsonb, p_at timestamptz, out ended int, out skipped bigint[])
language plpgsql
-- profile: nested
as $$
declare
  v_tasks text[]; v_counts bigint[]; v_attempts bigint[]; v_ordered bigint[]; v_keys text[];
  v_parents boolean := exists (select from tallybook.parent p where p.ended_as is null);
begin
  skipped := '{}';
  if exists (select from tallybook.tombstone) then skipped := tallybook._skip(p_lane_id, p_retention, p_xids, p_seqs,
      p_at); end if;
  with met as materialized (
    select e.xid, e.seq, e.job_id, e.attempt, e.task, e.order_key
      from unnest(p_xids, p_seqs) f(xid, seq), lateral (
        select x.xid, x.seq, x.job_id, x.attempt, x.task, x.order_key from tallybook.entry x
         where x.lane_id = p_lane_id and x.retention = p_retention and x.xid = f.xid and x.seq = f.seq limit 1) e
     where skipped = '{}' or e.seq <> all (skipped)
  ), gone as (  -- plain: who else ends what nobody has taken leaves a tombstone, and is skipped
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
    select m.xid, m.seq, m.job_id, p_at, p_retention, 'cancelled', p_error from met m order by m.job_id
  ), counted as (select m.task, count(*) as n, sum(m.attempt) as attempts from met m group by m.task)
  select (select coalesce(sum(c.n), 0) from counted c), (select array_agg(c.task) from counted c),
         (select array_agg(c.n) from counted c), (select array_agg(c.attempts) from counted c),
         (select array_agg(m.job_id) from met m where m.order_key is not null),
         (select array_agg(distinct m.order_key) from met m where m.order_key is not null),
         v_parents and exists (select from met m join tallybook.parent p on p.parent_id = m.job_id
                               and p.ended_as is null)
    into ended, v_tasks, v_counts, v_attempts, v_ordered, v_keys, v_parents;
  if v_tasks is not null then
    perform tallybook._tally(array_fill(p_lane_id, array[cardinality(v_tasks)]), v_tasks,
                             array_fill('cancelled'::text, array[cardinality(v_tasks)]), v_counts, v_attempts);
  end if;
  if v_ordered is not null then perform tallybook._leave_lines(v_ordered, v_keys, p_at); end if;
  if v_parents then perform tallybook._wake(' parents_resolve'); end if;
end $$;
