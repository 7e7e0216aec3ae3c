-- _bucket(from, to): the number of a duration's bucket in histograms: a quarter of an octave wide, from 1 ms; 0:
-- shorter, or no duration.
create or replace function tallybook._bucket(p_from timestamptz, p_to timestamptz) returns smallint
language sql immutable as $$
  -- PostgreSQL 16 cannot take infinity away
  select case when (isfinite(p_from) and isfinite(p_to)) is not true then 0::smallint
              when p_to - p_from > interval '1 ms' then least(160,
                                                              1 + floor(4 * ln(extract(epoch from p_to - p_from)::float8
                                                                  * 1000) / 0.6931471805599453))::smallint
                                                                  else 0::smallint end
$$;

-- _retired_now(lane): whether the caller's transaction has just retired this lane. Only a rebase does: it recounts the
-- jobs that it moves. A setting would not do, since any session can change it.
-- profile: hot
create or replace function tallybook._retired_now(p_lane_id int) returns boolean language plpgsql stable as $$
begin return exists (select from tallybook.lane l where l.lane_id = p_lane_id and l.retired_at is not null
                                                        and l.xmin = pg_current_xact_id()::xid); end $$;

-- _count_moved(): the trigger of scheduled, waiting and dead. Counts rows that are inserted, deleted, or change their
-- lane.
-- profile: nojit
create or replace function tallybook._count_moved() returns trigger language plpgsql as $$
declare v_what text := tg_table_name; v_failed text := case v_what when 'scheduled' then 'retrying' else v_what end;
begin
  if tg_op = 'UPDATE' then
    if tallybook._retired_now(old.lane_id) then return null; end if;
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    values (old.lane_id, -1, -old.attempt, (case when old.failures > 0 then v_failed
                                            else v_what end)::tallybook.counted, old.task),
           (new.lane_id, 1, new.attempt, (case when new.failures > 0 then v_failed else v_what end)::tallybook.counted,
            new.task);
  else
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    select m.lane_id, count(*) * g.sign, sum(m.attempt) * g.sign,
           (case when m.failures > 0 then v_failed else v_what end)::tallybook.counted, m.task
      from moved m, (select case tg_op when 'INSERT' then 1 else -1 end as sign) g
     group by m.lane_id, m.task, m.failures > 0, g.sign;
  end if;
  return null;
end $$;
