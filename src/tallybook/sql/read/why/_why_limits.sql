-- _why_limits(place, at): which limits would prevent a start after the claim. A part of why.
--
-- The answer at the start can differ, because limits change until then. Reads what why reads.
create or replace function tallybook._why_limits(w tallybook._job_place, p_at timestamptz)
returns setof tallybook._reason language plpgsql stable as $$
declare v_key text; v_next timestamptz; v_turn boolean := coalesce(w.options ? 'turn', false);
begin
  for v_key in select distinct n from jsonb_array_elements_text(coalesce(w.options -> 'limits', '[]')
                                                                || tallybook._wide_limits(w.queue, w.task)) n
                                                                order by n loop
    -- already in the answer
    continue when v_key = w.options ->> 'held' or w.place = 'scheduled' and v_key = w.options ->> 'turn';
    return query select x.* from tallybook._why_permit(v_key, p_at) x
                  where not exists (
                    select from tallybook.concurrency_holder h where h.name = v_key and h.job_id = w.job_id);
    if exists (select from tallybook._limit_of('rate', v_key)) then
      v_next := (select s.next_at from tallybook.rate_state s where s.name = v_key);
      if not v_turn then  -- a new job goes behind the waiting ones
        v_next := greatest(v_next, (select x.run_at from tallybook.scheduled x where x.options ? 'turn'
                                    and x.options ->> 'turn' = v_key order by x.run_at desc limit 1));
      end if;
      return query select x.* from tallybook._why_rate(v_key, v_next, p_at) x
                    where v_next > p_at + case when v_turn then interval '400 ms' else interval '150 ms' end;
    elsif not exists (select from tallybook._limit_of('concurrency', v_key))
          and not exists (select from tallybook._limit_of('breaker', v_key)) then
      return query
      select 'unknown_limit', format('It names the limit %s, which does not exist. It will fail when it starts.',
                                     to_json(v_key)), jsonb_build_object('key', v_key);
    end if;
  end loop;
end $$;
