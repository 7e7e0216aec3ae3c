-- schedule_pause(name, who): its ticks are not fired until schedule_resume. False: it was paused already.
--
-- Survives changes and new releases of the code. Errors: TB002 no such schedule. Writes schedule.
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
