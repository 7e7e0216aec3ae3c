-- _truncate_aside(lanes, states, max, up_to, error, at): cancel scheduled and waiting jobs of these lanes, at most
-- `max`.
--
--   states  scheduled, retrying, waiting; null: all three.   up_to  jobs with higher ids stay
-- Jobs locked by another session stay, and busy reports that. Reads scheduled, waiting; writes: see _cancel_aside.
-- profile: nested
create or replace function tallybook._truncate_aside(p_lanes int[], p_states text[], p_max int, p_up_to bigint,
  p_error jsonb, p_at timestamptz, out ended int, out busy boolean) language plpgsql as $$
declare v_lane int; v_ids bigint[] := '{}'; v_id bigint; v_timeouts int := 0;
begin
  ended := 0; busy := false; p_states := coalesce(p_states, '{scheduled,retrying,waiting}');
  foreach v_lane in array p_lanes loop
    exit when cardinality(v_ids) >= p_max;
    v_ids := v_ids || array(
      select s.job_id from tallybook.scheduled s
       where s.lane_id >= v_lane and s.lane_id <= v_lane and s.job_id <= p_up_to
         and case when s.failures > 0 then 'retrying' else 'scheduled' end = any (p_states)
       -- by its index: see queue_top
       order by s.lane_id, s.run_at, s.job_id limit p_max - cardinality(v_ids) for update skip locked);
    continue when 'waiting' <> all (p_states);
    v_ids := v_ids || array(
      select w.job_id from tallybook.waiting w where w.lane_id = v_lane and w.fair_key is null and w.job_id <= p_up_to
       order by w.job_id limit p_max - cardinality(v_ids) for update skip locked);
    v_ids := v_ids || array(
      select w.job_id from tallybook.waiting w
       where w.lane_id = v_lane and w.fair_key is not null and w.job_id <= p_up_to
       order by w.fair_key, w.fair_seq limit p_max - cardinality(v_ids) for update skip locked);
  end loop;
  if v_ids <> '{}' then
    begin
      ended := tallybook._cancel_aside(v_ids, p_error, p_at);
    exception when lock_not_available then  -- another open transaction cancels one of them: leave it out
      foreach v_id in array v_ids[:500] loop
        begin
          ended := ended + tallybook._cancel_aside(array[v_id], p_error, p_at);
        exception when lock_not_available then
          v_timeouts := v_timeouts + 1;
        end;
        exit when v_timeouts = 10;
      end loop;
      busy := v_timeouts > 0;
    end;
  end if;
  if ended = 0 then  -- is there one with a lock?
    busy := busy or exists (
              select from unnest(p_lanes) l(id), lateral (
                select from tallybook.scheduled s
                 where s.lane_id >= l.id and s.lane_id <= l.id and s.job_id <= p_up_to
                   and case when s.failures > 0 then 'retrying' else 'scheduled' end = any (p_states)
                 order by s.lane_id, s.run_at limit 1) x)
         or 'waiting' = any (p_states) and (exists (
              select from unnest(p_lanes) l(id) join tallybook.waiting w on w.lane_id = l.id
               where w.fair_key is null and w.job_id <= p_up_to) or exists (
              select from unnest(p_lanes) l(id) join tallybook.waiting w on w.lane_id = l.id
               where w.fair_key is not null and w.job_id <= p_up_to));
  end if;
end $$;
