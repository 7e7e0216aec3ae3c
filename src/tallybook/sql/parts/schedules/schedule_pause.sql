-- schedule_pause(name, who): stop firing ticks until schedule_resume. Returns false if it was already paused.
--
-- The pause survives changes and new releases of the code. Errors: TB002 unknown schedule. Writes schedule.
-- rights: operator
create or replace function tallybook.schedule_pause(name text, who text default session_user,
  at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  perform tallybook._known_schedule(schedule_pause.name);
  update tallybook.schedule s
     set paused_at = schedule_pause.at, paused_by = coalesce(who, session_user), tick = null, due_at = null,
         revision = pg_current_xact_id()
   where s.name = schedule_pause.name and s.paused_at is null;
  return found;
end $$;
