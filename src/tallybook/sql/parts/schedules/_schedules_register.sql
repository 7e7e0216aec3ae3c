-- _schedules_register(app, schedules, at): store the schedules that an app's code declares, at the start of a
-- worker. If nothing has changed, nothing is written or locked.
--
-- schedules: [{"name", "task", "cron" or "every", ...}], columns of the table; null: all of them are for another node,
-- and a paused one stays until it moves there. Returns what was done, one row each: created, changed, or removed, for
-- one that has left the code of this app; taken: the name belongs to another app (detail), or to the database; refused:
-- it is invalid (detail: why); busy: another open transaction has locked the row, try again later. A pause stays. Reads
-- and writes schedule.
-- rights: worker
create or replace function tallybook._schedules_register(p_app text, p_schedules jsonb,
  p_at timestamptz default clock_timestamp())
returns table (schedule_name text, what text, detail text)
language plpgsql as $$
declare v record; d tallybook.schedule;
begin
  -- In the order of the names, what leaves and what comes: two workers of two releases that start at once cannot
  -- deadlock.
  for v in
    select n.name, x.def
      from (select e ->> 'name' from jsonb_array_elements(p_schedules) e
            union select s.name from tallybook.schedule s where s.source = 'code' and s.app = p_app
                     and (p_schedules is not null or s.paused_at is null)) n(name)
      left join jsonb_array_elements(p_schedules) x(def) on x.def ->> 'name' = n.name
     order by n.name
  loop
    schedule_name := v.name; detail := null; what := null;
    if v.def is null then
      delete from tallybook.schedule s
       where s.name = (select g.name from tallybook.schedule g
                        where g.name = v.name and g.source = 'code' and g.app = p_app for update skip locked);
      what := case when found then 'removed' else 'busy' end;
      return next; continue;
    end if;
    begin
      d := jsonb_populate_record(null::tallybook.schedule,
             '{"queue": "default", "args": {}, "priority": 2, "tz": "UTC", "jitter": "0", "missed": "once", '
             '"catch_up": 100, "overlap": false}'
             || v.def || jsonb_build_object('source', 'code', 'app', p_app));
      continue when exists (
        select from tallybook.schedule s where s.name = v.name and s.source = 'code' and s.app = p_app
           and tallybook._same_schedule(s, d));
      what := tallybook._schedule_set(d, p_at, false);
      if what = 'taken' then select s.app into detail from tallybook.schedule s where s.name = v.name; end if;
    exception when sqlstate 'TB005' or data_exception or integrity_constraint_violation then
      -- The server may know other time zones than the program; the worker's other schedules must run.
      what := 'refused'; detail := sqlerrm;
    end;
    if what <> 'unchanged' then return next; end if;
  end loop;
end $$;
