-- subject_move(task, subject, run_at, at, queue): move a planned subject to another time, and change nothing else. For
-- people.
--
-- Returns moved, or the reason why nothing was done: pending (it is already available), active, completed, killed,
-- dead, unknown (there is none).
-- A past time means at once. Waits for a producer that changes the same subject. queue: as in subject_forget.
-- Errors: TB005 an invalid time, a name that several queues have.
-- Reads subject_job, see _subject_now; writes scheduled, amendment.
-- profile: nested
-- rights: operator
create or replace function tallybook.subject_move(task text, subject text, run_at timestamptz,
  at timestamptz default clock_timestamp(), queue text default null) returns text language plpgsql as $$
declare k record; v_state text;
begin
  perform tallybook._refuse(run_at is null or not isfinite(run_at), 'subject_move needs a time',
                            'Pass run_at; the present time means at once.');
  select n.job_id, n.ended_as into k from tallybook._subject_named(task, subject, queue) n;
  if k.job_id is null then return 'unknown'; end if;
  if k.ended_as is not null then return k.ended_as; end if;
  perform tallybook._subject_absorb(k.job_id);  -- the changes during its move there; locks it
  select n.state into v_state from tallybook._subject_now(k.job_id, subject_move.at) n;
  if v_state = 'planned' then
    update tallybook.scheduled s set run_at = subject_move.run_at, options = tallybook._turn_over(s.options)
     where s.job_id = k.job_id;
    if found then
      if subject_move.run_at < subject_move.at + interval '10 s' then perform tallybook._wake(' promote'); end if;
      return 'moved';
    end if;
    return 'pending';  -- it is pushed back out of its line, and not there yet
  end if;
  return coalesce(v_state, 'unknown');
end $$;
