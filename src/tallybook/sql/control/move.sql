-- move(lease, job_id, attempt): set a job aside for workers that know its task, or the version of its args.
--
-- The job moves once, to the part of its queue from which only these workers claim. Counts no failure, and the attempt,
-- which never started, is not shown as one of its attempts.
-- Returns moved, or refused. Reads claim, entry, lane; writes outcome, tally, entry, at first use lane.
-- rights: worker
create or replace function tallybook.move(lease uuid, job_id bigint, attempt int,
  at timestamptz default clock_timestamp()) returns text
language plpgsql as $$
declare
  e tallybook.entry := tallybook._end(lease, job_id, attempt, 'moved', null, move.at);
  v_queue text; v_priority int;
begin
  if e.job_id is null then return 'refused'; end if;
  select l.queue, l.priority into v_queue, v_priority from tallybook.lane l where l.lane_id = e.lane_id;
  select n.lane_id, n.retention into e.lane_id, e.retention from tallybook._lane(v_queue, v_priority,
    case when e.options ->> 'version' ~ '^([2-9]|[1-9][0-9]{1,2})$'
         then format('version:%s:%s', e.options ->> 'version', e.task)
         else 'task:' || e.task end) n;
  e.attempt := e.attempt + 1; e.seq := null;
  perform tallybook._place(e, null, at, v_queue);
  return 'moved';
end $$;
