-- _schedules_give(): take all schedules away from this database, for another one that will have them; as JSON.
--
-- Until the caller commits nobody can fire them here. Writes schedule.
create or replace function tallybook._schedules_give() returns jsonb
language sql as $$
  with gone as (delete from tallybook.schedule s returning s.*)
  select coalesce(jsonb_agg(to_jsonb(g) order by g.name), '[]') from gone g
$$;

-- _schedules_take(schedules): store the schedules of another database here; returns their number. One that is here
-- only takes the pause. Ticks that came due meanwhile are missed ticks. The last job is forgotten: it is a job of the
-- other database. Writes schedule.
create or replace function tallybook._schedules_take(p_schedules jsonb) returns int language plpgsql as $$
declare v_taken int;
begin
  insert into tallybook.schedule as k
  select (jsonb_populate_record(s, jsonb_build_object('revision', pg_current_xact_id()::text, 'last_job_id', null,
                                                      'line', null))).*
    from jsonb_populate_recordset(null::tallybook.schedule, p_schedules) s
      on conflict (name) do update set paused_at = excluded.paused_at, paused_by = excluded.paused_by, tick = null,
         due_at = null, revision = excluded.revision where k.paused_at is null and excluded.paused_at is not null;
  get diagnostics v_taken = row_count;
  if v_taken > 0 then perform tallybook._wake(' schedule'); end if;
  return v_taken;
end $$;
