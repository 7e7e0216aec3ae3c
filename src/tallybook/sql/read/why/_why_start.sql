-- _why_start(place, at): what would prevent a start after the claim: its expiry, its limits, its order key, a producer.
-- A part of why.
--
-- The answer at the start can differ, because limits change until then. Reads what why reads.
create or replace function tallybook._why_start(w record, p_at timestamptz) returns setof tallybook._reason
language plpgsql stable
-- profile: nested
as $$
declare
  v_key text; v_next timestamptz;
begin
  if w.expires_at <= greatest(p_at, case when w.place = 'scheduled' then w.run_at end) then
    return query
    select 'expired', format('It expired at %s, so it does not start. The next claim makes it a dead letter.',
                             tallybook._moment(w.expires_at)), jsonb_build_object('since', w.expires_at), 1;
    return;
  end if;
  if w.order_key is not null and w.place = 'entry' then
    return query select * from tallybook._why_order(w.job_id, w.order_key, 2);
  end if;
  for v_key in select distinct n from jsonb_array_elements_text(coalesce(w.options -> 'limits', '[]')
                                                                || tallybook._wide_limits(w.queue, w.task)) n
                                                                order by n loop
    -- already in the answer
    continue when v_key = w.options ->> 'held' or w.place = 'scheduled' and v_key = w.options ->> 'turn';
    return query select x.* from tallybook._why_permit(v_key, p_at, 3) x
                  where not exists (
                    select from tallybook.concurrency_holder h where h.name = v_key and h.job_id = w.job_id);
    if exists (select from tallybook._limit_of('rate', v_key)) then
      v_next := (select s.next_at from tallybook.rate_state s where s.name = v_key);
      if not coalesce(w.options ? 'turn', false) then  -- a new job goes behind the waiting ones
        v_next := greatest(v_next, (select x.run_at from tallybook.scheduled x where x.options ? 'turn'
                                    and x.options ->> 'turn' = v_key order by x.run_at desc limit 1));
      end if;
      return query select x.* from tallybook._why_rate(v_key, v_next, p_at, 3) x
                    where v_next > p_at + case when coalesce(w.options ? 'turn', false) then interval '400 ms'
                                          else interval '150 ms' end;
    elsif not exists (select from tallybook._limit_of('concurrency', v_key))
          and not exists (select from tallybook._limit_of('breaker', v_key)) then
      return query
      select 'unknown_limit', format('It names the limit %s, which does not exist. It will fail when it starts.',
                                     to_json(v_key)), jsonb_build_object('key', v_key), 3;
    end if;
  end loop;
  if w.unique_key is not null and (tallybook._amendment_state(w.job_id, w.task, tallybook._crowd())).busy then
    return query
    select 'busy', 'An open transaction of a producer changes it or depends on it, or on hundreds of jobs of its '
                   'task. It starts when that transaction has ended.', '{}'::jsonb, 4;
  end if;
end $$;
