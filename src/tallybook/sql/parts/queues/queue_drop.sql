-- queue_drop(queue, truncate, by, at): forget a queue that nobody uses: its settings go. False: there is none.
--
--   truncate  true: what it holds is cancelled first, in this transaction; for many jobs, and for those of more than
--             256 lanes, call
--             queue_truncate before, batch by batch
-- Its lanes stay, as do its dead letters and the history of its jobs, until they are dropped and pruned. A producer is
-- never in the way and never refused: whoever enqueues, now or later, has made the queue anew, with the defaults.
-- Limits of the key queue:NAME stay.
-- Errors: TB005 while it has open jobs, workers that serve it, or schedules: it says how many. Reads lane, worker,
-- schedule, what
-- _open_jobs reads; deletes from queue; writes lane.
-- rights: operator
create or replace function tallybook.queue_drop(queue text, truncate boolean default false,
  by text default session_user, at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
declare
  v_mark jsonb; v_remain boolean := truncate; v_jobs bigint; v_workers bigint; v_schedules bigint;
begin
  if not exists (select from tallybook.queues q where q.name = queue_drop.queue) then return false; end if;
  select count(*) into v_workers from tallybook.worker w where w.ended_at is null and queue_drop.queue = any (w.queues);
  select count(*) into v_schedules from tallybook.schedule s where s.queue = queue_drop.queue;
  perform tallybook._refuse(v_workers + v_schedules > 0,
            format('queue %s is in use: %s workers serve it, %s schedules enqueue into it', to_json(queue), v_workers,
                   v_schedules), 'Stop these workers and drop these schedules first.');
  while v_remain loop
    select t.mark, t.remain into v_mark, v_remain from tallybook.queue_truncate(queue, mark => v_mark, by => by,
        at => at) t;
  end loop;
  select count(*) into v_jobs from tallybook._open_jobs(queue_drop.queue, null, null, null, null, null);
  perform tallybook._refuse(v_jobs > 0, format('queue %s has %s open jobs', to_json(queue), v_jobs),
            'Let them end, or truncate the queue; what runs has to end by itself, or to be cancelled.');
  perform tallybook._queue_said(queue, 'dropped', by);
  delete from tallybook.queue q where q.name = queue_drop.queue;
  perform tallybook._queue_lanes(queue);
  -- A producer whose transaction is open at this moment is not in it: its job makes the queue anew. One's own is.
  update tallybook.lane l set dropped = s.now from (select tallybook._settled() as now offset 0) s
    where l.queue = queue_drop.queue;
  return true;
end $$;

-- _settled(): what has committed by now, the caller's own transaction among it, as a snapshot.
create or replace function tallybook._settled() returns pg_snapshot
language plpgsql as $$
declare
  v_own numeric := pg_current_xact_id()::text::numeric; s pg_snapshot := pg_current_snapshot();
  v_to numeric := pg_snapshot_xmax(s)::text::numeric;
begin
  return format('%s:%s:%s', pg_snapshot_xmin(s), greatest(v_to, v_own + 1), (
    select string_agg(x::text, ',' order by x) from (
      select i::text::numeric as x from pg_snapshot_xip(s) i
      union select generate_series(v_to, v_own - 1)) r where x <> v_own))::pg_snapshot;
end $$;
