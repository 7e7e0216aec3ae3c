-- schedule_resume(name): let a paused schedule fire again, from its next tick on. Returns false if it was not paused.
-- Ticks during the pause are not caught up. Errors: TB002 unknown schedule. Writes schedule.
-- rights: operator
create or replace function tallybook.schedule_resume(name text, at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  perform tallybook._known_schedule(schedule_resume.name);
  update tallybook.schedule s
     set paused_at = null, paused_by = null, since = schedule_resume.at, tick = null, due_at = schedule_resume.at,
         revision = pg_current_xact_id()
   where s.name = schedule_resume.name and s.paused_at is not null;
  perform tallybook._wake(' schedule') where found;
  return found;
end $$;

-- _known_schedule(name): raise TB002 for an unknown schedule.
create or replace function tallybook._known_schedule(p_name text) returns void
language sql stable as $$
  select tallybook._refuse(not exists (select from tallybook.schedule s where s.name = p_name),
    format('there is no schedule %s', coalesce(to_json(p_name)::text, '<NULL>')),
    'List the names with "tallybook schedule list", or in tallybook.schedule.', 'TB002')
$$;
