-- crash(lease, job_id, attempt, error, max_crashes): end an attempt whose own process has died: out of memory, a
-- segmentation fault, an exit. The worker, which is still alive, calls this.
--
--   error        what is known, as one JSON object: type, message
--   max_crashes  this many crashes make the job a dead letter with the reason crashed
-- The attempt ends as lost, as by rescue: it counts as a crash, not as a failure. The next attempt comes after 1 s, 2
-- s, 4 s, ..., at most a minute, so that a job that crashes at its start does not keep a worker busy with starting
-- processes.
-- Returns scheduled, dead, or refused (the lease no longer holds the attempt; nothing has happened). Errors: TB005 an
-- error that is not an object.
-- Reads claim, entry; writes outcome, and scheduled or dead.
-- rights: worker
create or replace function tallybook.crash(lease uuid, job_id bigint, attempt int, error jsonb,
  max_crashes int default 3, at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare e tallybook.entry; v_error jsonb;
begin
  if jsonb_typeof(error) <> 'object' then
    raise exception 'an error is one JSON object, not %', jsonb_typeof(error) using errcode = 'TB005';
  end if;
  v_error := jsonb_build_object('attempt', crash.attempt, 'at', crash.at) || coalesce(error, '{"message": "crashed"}');
  e := tallybook._end(lease, crash.job_id, crash.attempt, 'lost', v_error, crash.at);
  if e.job_id is null then return 'refused'; end if;
  return tallybook._lost(e, v_error, crash.at, max_crashes, true,
                         make_interval(secs => least(60, power(2, least(e.crashes, 6)))));
end $$;
