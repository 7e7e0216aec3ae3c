-- schedule_resume(name): let a paused schedule fire again, from its next tick on. False: it was not paused.
-- Ticks of the pause were not missed: nothing is caught up. Errors: TB002. Writes schedule.
-- rights: operator
create or replace function tallybook.schedule_resume(name text, at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  update tallybook.schedule s
     set paused_at = null, paused_by = null, since = schedule_resume.at, tick = null, due_at = schedule_resume.at,
         revision = pg_current_xact_id()
   where s.name = schedule_resume.name and s.paused_at is not null;
  if found then
    perform tallybook._wake(' schedule');
    return true;
  end if;
  perform tallybook._known_schedule(schedule_resume.name);
  return false;
end $$;

-- _known_schedule(name): TB002 for one that there is not.
create or replace function tallybook._known_schedule(p_name text) returns void
language plpgsql stable as $$
begin
  if not exists (select from tallybook.schedule s where s.name = p_name) then
    raise exception 'there is no schedule %', to_json(p_name)
      using errcode = 'TB002', hint = 'See the names with "tallybook schedule list", or in tallybook.schedule.';
  end if;
end $$;
