-- _tally(lane_ids, tasks, whats, counts): says to the counters what the caller has ended. Replaced by the counters' own when they are there;
-- until then it does nothing.
create or replace function tallybook._tally(p_lane_ids int[], p_tasks text[], p_whats text[], p_counts bigint[]) returns void
language sql as $$ select $$;
