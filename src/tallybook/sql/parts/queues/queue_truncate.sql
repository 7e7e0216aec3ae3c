-- queue_truncate(queue, states, running, by, max_jobs, mark, at): cancel the jobs of a queue in batches, except running
-- ones.
--
--   states    available, scheduled, retrying, waiting; null: all four
--   running   true: also cancel running jobs; their workers stop them, as for cancel
--   by        who does it: stored with the reason "truncated"
--   max_jobs  most jobs per call; meanwhile, a claim of the lane may have to wait
--   mark      the mark that the previous call returned; null: begin
-- Returns the number of jobs that this call has cancelled, the number of running jobs that are being cancelled
-- (cancelling), and remain: commit, and call again with mark until it is false. busy: jobs that other open transactions
-- use were left out. Jobs enqueued after the first call can be left out, too; jobs enqueued in the same transaction as
-- the call always are. The jobs are shown as cancelled; their unique keys, permits and order keys are free, and jobs
-- that wait for them continue. With all states, completed and killed subjects are forgotten, too: a later push of such
-- a name creates a new one. A dead subject stays, like its dead letter. Available jobs are ended in bulk: one claim row
-- moves the cursor past them, and no job is claimed. mark records the progress, so that later calls skip empty lanes. A
-- call visits at most 1000 lanes, and ends jobs of at most 100. Errors: TB002 unknown queue, TB003 needs READ
-- COMMITTED, TB005 invalid value, or more than 256 lanes with jobs in one transaction. Locks: lanes, until its commit;
-- it waits for the first and tries the others. Reads lane, claim, entry, scheduled, waiting, subject_job; writes claim,
-- outcome, entry, tombstone; deletes from subject_job; see _truncate_line, _cancel_aside, cancel_many.
-- profile: hot
-- rights: operator
create or replace function tallybook.queue_truncate(queue text, states text[] default null,
  running boolean default false, by text default session_user, max_jobs int default 10000,
  inout mark jsonb default null, at timestamptz default clock_timestamp(), out cancelled int, out cancelling int,
  out busy boolean, out remain boolean) language plpgsql as $$
declare v_error jsonb; l record; t record; v_locked int := 0; v_seen int := 0; v_next xid8;
begin
  perform tallybook._refuse(not states <@ '{available,scheduled,retrying,waiting}' or states = '{}',
            format('states %s cannot be truncated', states),
            'Use available, scheduled, retrying, waiting; pass running => true for running jobs.');
  perform tallybook._check_range('max_jobs', coalesce(max_jobs::text, '<NULL>'), max_jobs between 1 and 100000,
                                 'It must be from 1 to 100000.');
  perform tallybook._read_committed('queue_truncate needs READ COMMITTED',
                                    'An older snapshot would read an old cursor.');
  perform tallybook._refuse(not exists (select from tallybook.queues q where q.name = queue_truncate.queue),
            format('there is no queue %s', to_json(queue)), 'See the view tallybook.queues.', 'TB002');
  perform tallybook._refuse(
            mark is not null and (mark ->> 'xid' ~ '^[0-9]{1,19}$' and mark ->> 'id' ~ '^[0-9]{1,19}$') is not true,
            format('%s is not a mark', mark), 'Pass the mark that the previous call returned, or null to begin.');
  cancelled := 0; cancelling := 0; busy := false; remain := true;
  v_error := jsonb_strip_nulls(jsonb_build_object('message', 'truncated', 'by', left(by, 500)));
  if mark is null then
    mark := jsonb_build_object('xid', pg_snapshot_xmax(pg_current_snapshot())::text, 'id',
                               (select s.last_value from tallybook.job_id s));
    perform tallybook._queue_changed(queue, 'truncated', by);
  end if;

  -- 1. Jobs that are not in line. They are written there with their end, so the cursor has to pass them afterwards.
  if not mark ? 'lane' then
    if states is null or states && array['scheduled', 'retrying', 'waiting'] then
      select a.ended, a.busy into cancelled, busy
        from tallybook._truncate_aside(array(select n.lane_id from tallybook.lane n where n.queue = queue_truncate.queue
                                             order by n.lane_id),
                                       states, max_jobs, (mark ->> 'id')::bigint, v_error, at) a;
      if cancelled > 0 then
        mark := mark || jsonb_build_object('xid', (pg_current_xact_id()::text::numeric + 1)::text);
        return;
      end if;
    end if;
    mark := mark || jsonb_build_object('lane', 0, 'busy', busy);
  end if;
  busy := (mark ->> 'busy')::boolean;

  -- 2. Jobs in line, lane by lane.
  if states is null or 'available' = any (states) then
    for l in select n.lane_id, n.retention, n.born from tallybook.lane n
              where n.queue = queue_truncate.queue and n.retired_at is null and n.lane_id > (mark ->> 'lane')::int
              order by n.lane_id limit 1000 loop
      if v_locked = 100 then return; end if;
      v_seen := v_seen + 1;
      if tallybook._next(l.lane_id, l.retention, l.born) < (mark ->> 'xid')::xid8 then
        perform tallybook._refuse(not tallybook._locks_left('tallybook.lanes_locked', 256),
                  format('one transaction truncates at most 256 lanes of queue %s', to_json(queue)),
                  'Call queue_truncate until remain is false, and commit after each call.');
        if v_locked = 0 then
          perform pg_advisory_xact_lock(1413565441, l.lane_id);
        elsif not pg_try_advisory_xact_lock(1413565441, l.lane_id) then
          return;  -- the next call waits for it without holding another lane
        end if;
        v_locked := v_locked + 1;
        loop
          v_next := tallybook._next(l.lane_id, l.retention, l.born);  -- in a newer snapshot, like every claim
          exit when not coalesce(v_next < (mark ->> 'xid')::xid8, false);
          if cancelled >= max_jobs then return; end if;
          select k.claim_id, k.jobs into t
            from tallybook._take(l.lane_id, l.retention, l.born, max_jobs - cancelled, null, null, v_next, at,
                                 v_error) k;
          exit when t.claim_id is null;
          cancelled := cancelled + t.jobs;
        end loop;
      end if;
      mark := mark || jsonb_build_object('lane', l.lane_id);
    end loop;
    if v_seen = 1000 or cancelled > 0 then return; end if;
  end if;

  -- 3. Stopped subjects: a part of those of all queues, in the order in which they stopped.
  if states is null and not coalesce((mark ->> 'subjects')::boolean, false) then
    v_seen := 0;
    for t in select j.task, j.subject, j.scope, j.ended_at, j.queue = queue_truncate.queue as ours
               from tallybook.subject_job j
              where j.ended_at is not null
                and (j.ended_at, j.task, j.subject, j.scope)
                    > (coalesce((mark #>> '{subject,0}')::timestamptz, '-infinity'),
                       coalesce(mark #>> '{subject,1}', ''), coalesce(mark #>> '{subject,2}', ''),
                       coalesce(mark #>> '{subject,3}', ''))
              order by j.ended_at, j.task, j.subject, j.scope limit max_jobs loop
      v_seen := v_seen + 1; l := t;
      continue when not coalesce(t.ours, false);
      delete from tallybook.subject_job d using (
        select x.task, x.subject, x.scope from tallybook.subject_job x
         where x.task = t.task and x.subject = t.subject and x.scope = t.scope
               and x.ended_as in ('completed', 'killed') and x.queue = queue_truncate.queue
           and x.job_id <= (mark ->> 'id')::bigint for update skip locked) k
       where d.task = k.task and d.subject = k.subject and d.scope = k.scope;
    end loop;
    if v_seen = max_jobs then
      mark := mark || jsonb_build_object('subject', jsonb_build_array(l.ended_at, l.task, l.subject, l.scope));
      return;
    end if;
    mark := mark || '{"subjects": true}';
  end if;

  -- 4. Running jobs.
  if running then
    select m.cancelling into cancelling
      from tallybook.cancel_many(queue => queue, states => array['running'], reason => 'truncated',
                                 max_jobs => max_jobs, at => at) m;
    remain := cancelling >= max_jobs;
  else
    remain := false;
  end if;
end $$;
