-- backlog(): how many jobs of each queue are in each state that is not an end, and since when the oldest of them could run.
--
-- Numbers only: for a metrics collector. Also dead letters. Reads what the view tallybook.job reads: all of the history that is kept,
-- so ask a few times a minute, not a second.
--   oldest_run_at  the earliest instant from which one of them could or can run
create or replace function tallybook.backlog(out queue text, out state text, out jobs bigint, out oldest_run_at timestamptz)
returns setof record language sql stable
set jit = off
as $$
  select j.queue, j.state, count(*), min(coalesce(j.run_at, j.enqueued_at)) from tallybook.job j
   where j.state not in ('completed', 'cancelled') group by j.queue, j.state order by j.queue, j.state
$$;
