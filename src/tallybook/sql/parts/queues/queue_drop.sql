-- queue_drop(queue, truncate, by, at): delete an unused queue with its settings. Returns false if there is none.
--
--   truncate  true: cancel its jobs first, in this transaction. For many jobs, or jobs in more than 256 lanes, first
--             call queue_truncate, batch by batch.
-- Its lanes, dead letters and the history of its jobs stay until they are dropped and pruned. Producers never wait and
-- are never refused: an enqueue, now or later, creates the queue again with the defaults. Limits of the key queue:NAME
-- stay.
-- Errors: TB005 while it has open jobs, workers or schedules; the error gives their numbers. Reads lane, worker,
-- schedule, what _open_jobs reads; deletes from queue; writes lane.
-- rights: operator
create or replace function tallybook.queue_drop(queue text, truncate boolean default false,
  by text default session_user, at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
declare v_mark jsonb; v_remain boolean := truncate; s pg_snapshot; v_own numeric; v_to numeric;
begin
  if not tallybook._queue_unused(queue) then return false; end if;
  while v_remain loop
    select t.mark, t.remain into v_mark, v_remain
      from tallybook.queue_truncate(queue, mark => v_mark, by => by, at => at) t;
  end loop;
  perform tallybook._refuse(count(*) > 0, format('queue %s has %s open jobs', to_json(queue), count(*)),
            'Wait for them, or truncate the queue; running jobs must end or be cancelled.')
     from tallybook._open_jobs(queue_drop.queue, null, null, null, null, null);
  perform tallybook._queue_changed(queue, 'dropped', by);
  delete from tallybook.queue q where q.name = queue_drop.queue;
  perform tallybook._queue_lanes(queue);
  -- All commits so far and the caller's own transaction. Open transactions of producers are not in it: their jobs
  -- create the queue again.
  v_own := pg_current_xact_id()::text::numeric; s := pg_current_snapshot(); v_to := pg_snapshot_xmax(s)::text::numeric;
  update tallybook.lane l set dropped = format('%s:%s:%s', pg_snapshot_xmin(s), greatest(v_to, v_own + 1), (
    select string_agg(x::text, ',' order by x) from (
      select i::text::numeric as x from pg_snapshot_xip(s) i
      union select generate_series(v_to, v_own - 1)) r where x <> v_own))::pg_snapshot where l.queue = queue_drop.queue;
  return true;
end $$;
