-- _why_start(...): what would keep a job from starting once it is claimed: its expiry, its limits, its order key, a
-- producer. For why; part of its answer.
--
-- What it is told when it asks for its start may be another thing: these stand as they are now. Reads what why reads.
create or replace function tallybook._why_start(p_job_id bigint, p_place text, p_queue text, p_task text,
  p_unique_key text, p_order_key text, p_expires_at timestamptz, p_run_at timestamptz, p_options jsonb,
  p_at timestamptz, out reason text, out explanation text, out details jsonb, out place int) returns setof record
language plpgsql stable
-- profile: nested
as $$
declare
  v_key text; r tallybook.limit_rule; v_next timestamptz; v_held text := p_options ->> 'held';
begin
  place := 1;
  if p_expires_at <= greatest(p_at, case when p_place = 'scheduled' then p_run_at end) then
    reason := 'expired'; details := jsonb_build_object('since', p_expires_at);
    explanation := format('No attempt starts after its expires_at, %s: whoever comes to it makes it a dead letter.',
                          tallybook._moment(p_expires_at));
    return next;
    return;
  end if;
  if p_order_key is not null and p_place = 'entry' then
    return query select x.*, 2 from tallybook._why_order(p_job_id, p_order_key) x where x.reason is not null;
  end if;
  for v_key in select distinct n from jsonb_array_elements_text(coalesce(p_options -> 'limits', '[]')
                                                                || tallybook._wide_limits(p_queue, p_task)) n
                                                                order by n loop
    continue when v_key = v_held or p_place = 'scheduled' and v_key = p_options ->> 'turn';  -- told already
    place := 3;
    return query select x.*, 3 from tallybook._why_permit(v_key, p_at) x
                  where x.reason is not null and not exists (
                    select from tallybook.concurrency_holder h where h.name = v_key and h.job_id = p_job_id);
    select x.* into r from tallybook._limit_of('rate', v_key) x;
    if found then
      select s.next_at into v_next from tallybook.rate_state s where s.name = v_key;
      if not coalesce(p_options ? 'turn', false) then  -- who comes anew goes behind those who wait
        v_next := greatest(v_next, (select x.run_at from tallybook.scheduled x where x.options ? 'turn'
                                    and x.options ->> 'turn' = v_key order by x.run_at desc limit 1));
      end if;
      if v_next > p_at + interval '150 ms' then
        reason := 'rate_limit';
        select x.explanation, x.details into explanation, details from tallybook._why_rate(v_key, v_next, p_at) x;
        return next;
      end if;
    elsif not exists (select from tallybook._limit_of('concurrency', v_key))
          and not exists (select from tallybook._limit_of('breaker', v_key)) then
      reason := 'unknown_limit'; details := jsonb_build_object('key', v_key);
      explanation := format('It names the limit %s, and there is none: it fails when it is started.', to_json(v_key));
      return next;
    end if;
  end loop;
  if p_unique_key is not null and (tallybook._amendment_state(p_job_id, p_task, tallybook._crowd())).busy then
    place := 4; reason := 'busy'; details := '{}';
    explanation := 'A producer''s open transaction changes it or relies on it, or does so with hundreds of jobs of its '
                   'task: it starts when that has ended.';
    return next;
  end if;
end $$;
