-- _why_late(place, at): why a job's time has not come, if that is why it does not run. A part of why.
create or replace function tallybook._why_late(w tallybook._job_place, p_at timestamptz) returns setof tallybook._reason
language plpgsql stable as $$
declare v_run_at timestamptz := w.run_at; v_last text; v_other timestamptz; v_at text;
begin
  if w.unique_key is not null then  -- an enqueue with its key may have changed its time
    select a.run_at into v_other from tallybook.amendment a where a.job_id = w.job_id;
    v_run_at := coalesce(v_other, v_run_at);
  end if;
  v_at := tallybook._moment(v_run_at);
  if w.place = 'entry' then
    return query
    select 'postponed', format('A later enqueue with its unique key moved it to %s.', v_at),
           jsonb_build_object('until', v_run_at) where v_other > p_at;
    return;
  end if;
  select o.state::text into v_last
    from tallybook._newest_entry(w.job_id) e, tallybook._outcome_of(e.retention, e.xid, e.seq) o;
  if v_run_at <= p_at then
    return query
    select 'service_pending', format('It has been due since %s. A worker moves it to its lane within seconds.', v_at),
           jsonb_build_object('service', 'promote', 'due_at', v_run_at, 'last_run_at',
                              (select s.last_run_at from tallybook.service s where s.name = 'promote'));
  elsif w.options ->> 'turn' <> '' and v_last = 'snoozed' then
    return query select * from tallybook._why_rate(w.options ->> 'turn', v_run_at, p_at);
  elsif w.failures > 0 and v_last = 'failed' then
    return query
    select 'retrying', format('It is retried at %s, after failure %s%s.', v_at, w.failures,
                              ': ' || left(w.error ->> 'message', 200)),
           jsonb_build_object('until', v_run_at, 'failures', w.failures, 'error', w.error - 'traceback');
  else
    return query
    select 'not_due', format('It is not due before %s%s.', v_at,
                             case when v_last = 'snoozed' then ': its handler returned Snooze' end),
           jsonb_build_object('until', v_run_at, 'after', v_last);
  end if;
end $$;

-- _why_rate(key, run_at, at): a job waits for its turn at a rate limit: behind how many, and whether the key was
-- pushed back.
create or replace function tallybook._why_rate(p_key text, p_run_at timestamptz, p_at timestamptz)
returns setof tallybook._reason language plpgsql stable as $$
begin
  return query
  select 'rate_limit', format('Its turn at the rate limit %s comes at about %s, behind %s%s.', to_json(p_key),
                              tallybook._moment(p_run_at), tallybook._others(b.n),
                              '; the key is closed until ' || tallybook._moment(s.pushed_to)),
         jsonb_build_object('key', p_key, 'rule', r.name, 'calls', r.most, 'per', r.per, 'until', p_run_at,
                            'pushed_to', s.pushed_to) || tallybook._counted_before(b.n)
    from (select count(*) as n from (
            select from tallybook.scheduled w
             where w.options ? 'turn' and w.options ->> 'turn' = p_key and w.run_at < p_run_at limit 10000) x) b
    left join lateral tallybook._limit_of('rate', p_key) r on true
    left join lateral (select k.pushed_to from tallybook.rate_state k
                        where k.name = p_key and k.pushed_to > p_at limit 1) s on true;
end $$;
