-- _why_late(...): why a job's time has not come, where that is why it does not run. For why; part of its answer.
create or replace function tallybook._why_late(p_job_id bigint, p_place text, p_run_at timestamptz, p_failures int,
  p_unique_key text, p_options jsonb, p_error jsonb, p_at timestamptz, out reason text, out explanation text,
  out details jsonb, out place int) returns setof record
language plpgsql stable
-- profile: hot
as $$
declare
  v_run_at timestamptz := p_run_at; v_last text; v_key text := p_options ->> 'turn'; v_other timestamptz;
begin
  place := 1;
  if p_unique_key is not null then  -- a conflict of keys may have given it another time
    select a.run_at into v_other from tallybook.amendment a where a.job_id = p_job_id;
    v_run_at := coalesce(v_other, v_run_at);
  end if;
  if p_place = 'entry' and v_other > p_at then
    reason := 'postponed'; details := jsonb_build_object('until', v_run_at);
    explanation := format('An enqueue with its unique key has put it off to %s.', tallybook._moment(v_run_at));
    return next;
  end if;
  if p_place = 'entry' then return; end if;
  select o.state::text into v_last from tallybook._newest(p_job_id) e, tallybook.outcome o
   where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1;
  if v_run_at <= p_at then
    reason := 'service_pending';
    select jsonb_strip_nulls(jsonb_build_object('service', 'promote', 'due_at', v_run_at, 'last_run_at',
                                                max(s.last_run_at)))
      into details from tallybook.service s where s.name = 'promote';
    explanation := format('It is due since %s: a worker puts it in line at its next look.',
                          tallybook._moment(v_run_at));
  elsif v_key is not null and v_last = 'snoozed' then
    select r.explanation, r.details into explanation, details from tallybook._why_rate(v_key, v_run_at, p_at) r;
    reason := 'rate_limit';
  elsif p_failures > 0 and v_last = 'failed' then
    reason := 'retrying'; details := jsonb_strip_nulls(jsonb_build_object('until', v_run_at, 'failures', p_failures,
        'error', p_error - 'traceback'));
    explanation := format('It is tried again at %s, after failure %s', tallybook._moment(v_run_at), p_failures)
      || coalesce(': ' || left(p_error ->> 'message', 200), '') || '.';
  else
    reason := 'not_due'; details := jsonb_strip_nulls(jsonb_build_object('until', v_run_at, 'after', v_last));
    explanation := format('It is not due before %s', tallybook._moment(v_run_at)) || case when v_last = 'snoozed'
      then ': its handler has put it off' else '' end || '.';
  end if;
  return next;
end $$;

-- _why_rate(key, run_at, at): who waits for its turn at a rate limit: behind how many, and whether the key was pushed.
create or replace function tallybook._why_rate(p_key text, p_run_at timestamptz, p_at timestamptz, out explanation text,
  out details jsonb)
language plpgsql stable
-- profile: hot
as $$
declare
  c_most constant int := 10000; v_n bigint; r tallybook.limit_rule; v_pushed timestamptz;
begin
  select x.* into r from tallybook._limit_of('rate', p_key) x;
  select s.pushed_to into v_pushed from tallybook.rate_state s where s.name = p_key and s.pushed_to > p_at;
  select count(*) into v_n from (
    select from tallybook.scheduled w where w.options ? 'turn' and w.options ->> 'turn' = p_key and w.run_at < p_run_at
           limit c_most) x;
  details := jsonb_strip_nulls(jsonb_build_object('key', p_key, 'rule', r.name, 'calls', r.most, 'per', r.per, 'until',
                                                  p_run_at, 'before', v_n,
                                                  'more', case when v_n = c_most then true end, 'pushed_to', v_pushed));
  explanation := format('Its turn at the rate limit %s comes at about %s, behind %s', to_json(p_key),
                        tallybook._moment(p_run_at), tallybook._others(v_n, c_most))
    || coalesce('; the key was pushed to ' || tallybook._moment(v_pushed), '') || '.';
end $$;
