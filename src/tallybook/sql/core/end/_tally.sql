-- _tally(lanes, tasks, whats, counts, attempts): count attempts that ended without a claim, per lane, task and ending.
--
-- Call it in the same transaction, once per batch. attempts: the sums of their numbers. Writes tally.
-- profile: nojit
create or replace function tallybook._tally(p_lane_ids int[], p_tasks text[], p_whats text[], p_counts bigint[],
  p_attempts bigint[] default null)
returns void language sql as $$
  insert into tallybook.tally (lane_id, n, attempts, what, task)
  select f.lane_id, sum(f.n), coalesce(sum(f.attempts), sum(f.n)), w.what::tallybook.counted, f.task
    from unnest(p_lane_ids, p_tasks, p_whats, p_counts, p_attempts) f(lane_id, task, what, n, attempts),
         unnest(array[f.what, 'unclaimed']) w(what)
   group by f.lane_id, w.what, f.task
$$;
