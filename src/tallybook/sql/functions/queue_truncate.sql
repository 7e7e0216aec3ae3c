-- queue_truncate(queue, states, running, by, max_jobs, mark, at): cancel what a queue holds, batch by batch, but for what runs.
--
--   states    of available, scheduled, retrying, waiting; null: all four
--   running   true: what runs is cancelled, too: its worker is told, as by cancel
--   by        who says so: kept with the reason, which is truncated
--   max_jobs  how many a call ends; one claim of the lane may have to wait for so long
--   mark      what the call before returned, so that the last one knows where the first began; null: begin
-- Returns how many jobs this call has ended (cancelled), how many run and were told (cancelling), and remain: commit, and call again
-- with mark, until it is false. busy: what others' open transactions hold was left. Jobs that are enqueued after the first call may be
-- left, too, and so is what its own transaction has put in. The jobs are on view as cancelled; their unique keys are free, their
-- places at limits, the lines of their order keys; jobs that wait for them are told.
-- What stands in line is ended in bulk and the cursor moves past it, in one claim row that hands out nothing.
-- Errors: TB002 no such queue, TB003 needs READ COMMITTED, TB005. Locks: one lane, to its commit. Reads lane, claim, entry, scheduled,
-- waiting; writes claim, outcome, entry, tombstone; see _truncate_line, _cancel_aside, cancel_many.
create or replace function tallybook.queue_truncate(queue text, states text[] default null, running boolean default false,
  by text default session_user, max_jobs int default 10000, inout mark jsonb default null, at timestamptz default clock_timestamp(),
  out cancelled int, out cancelling int, out busy boolean, out remain boolean)
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  c_states constant text[] := array['available', 'scheduled', 'retrying', 'waiting'];
  v_error jsonb; l record;
begin
  if not states <@ c_states or states = '{}' then
    raise exception 'states % cannot be truncated', states
      using errcode = 'TB005', hint = 'They are available, scheduled, retrying, waiting; say running => true for what runs.';
  end if;
  if max_jobs is null or max_jobs not between 1 and 100000 then
    raise exception 'max_jobs % is out of range', max_jobs using errcode = 'TB005', hint = 'It goes from 1 to 100000.';
  end if;
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'queue_truncate needs READ COMMITTED' using errcode = 'TB003', hint = 'An older snapshot would read an old cursor.';
  end if;
  if not exists (select from tallybook.queues q where q.name = queue_truncate.queue) then
    raise exception 'there is no queue %', to_json(queue) using errcode = 'TB002', hint = 'See the view tallybook.queues.';
  end if;
  if mark is not null and not coalesce(mark ->> 'xid' ~ '^\d{1,19}$' and mark ->> 'id' ~ '^\d{1,19}$', false) then
    raise exception '% is no mark', mark using errcode = 'TB005', hint = 'Say the mark that the call before returned, or none to begin.';
  end if;
  cancelled := 0; cancelling := 0; busy := false; remain := true;
  v_error := jsonb_strip_nulls(jsonb_build_object('message', 'truncated', 'by', left(by, 500)));
  if mark is null then
    mark := jsonb_build_object('xid', pg_snapshot_xmax(pg_current_snapshot())::text, 'id', (select s.last_value from tallybook.job_id s));
    perform tallybook._queue_said(queue, 'truncated', by);
  end if;

  -- 1. What is not in line: it comes there, ended, and so the cursor has to pass it afterwards.
  if states is null or states && array['scheduled', 'retrying', 'waiting'] then
    select a.ended, a.busy into cancelled, busy
      from tallybook._truncate_aside(array(select n.lane_id from tallybook.lane n where n.queue = queue_truncate.queue order by n.lane_id),
                                     states, max_jobs, (mark ->> 'id')::bigint, v_error, at) a;
    if cancelled > 0 then
      mark := mark || jsonb_build_object('xid', (pg_current_xact_id()::text::numeric + 1)::text);
      return;
    end if;
  end if;

  -- 2. One batch of one lane's line.
  if states is null or 'available' = any (states) then
    for l in select n.lane_id, n.retention, n.born from tallybook.lane n
              where n.queue = queue_truncate.queue and n.retired_at is null order by n.lane_id loop
      continue when not coalesce(tallybook._next(l.lane_id, l.retention, l.born) < (mark ->> 'xid')::xid8, false);
      perform pg_advisory_xact_lock(1413565441, l.lane_id);
      -- In a newer snapshot, as every claim.
      select t.jobs into cancelled from tallybook._take(l.lane_id, l.retention, l.born, max_jobs, null, null,
        tallybook._next(l.lane_id, l.retention, l.born), at, v_error) t;
      return;
    end loop;
  end if;

  -- 3. What runs.
  if running then
    select m.cancelling into cancelling
      from tallybook.cancel_many(queue => queue, states => array['running'], reason => 'truncated', max_jobs => max_jobs, at => at) m;
    remain := cancelling >= max_jobs;
  else
    remain := false;
  end if;
end $$;
