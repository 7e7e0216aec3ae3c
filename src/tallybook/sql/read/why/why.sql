-- why(job_id, at): why a job does not run, or what has become of it. One row a reason, in the order in which they would
-- have to be solved.
--
--   state        as the view tallybook.job says it; null: there is no such job
--   reason       a short code; docs/why.md lists them. should_start: nothing holds it
--   explanation  one sentence for people
--   details      what a program wants to know: instants, keys, ids, numbers. more: there were more than were counted
-- What runs, has ended or is unknown has a reason, too. What waits in line may have several: all are told that are
-- known now. A limit of an available job is asked for only when it is claimed, so what is told of it is what it would
-- be told now.
-- By one snapshot, and by index look-ups: nothing is counted beyond 10,000 jobs, 10 names are listed at most. Takes a
-- lock of a job with a unique key for a microsecond, to know whether a producer changes it. at: the time; for tests.
-- Reads scheduled, waiting, dead, entry, claim, outcome, tombstone, amendment, lane, queue, worker, parent, order_line,
-- order_turn, progress, limit_rule, rate_state, concurrency_holder, concurrency_line,
-- breaker_state, service, subject_job.
-- rights: operator
create or replace function tallybook.why(job_id bigint, at timestamptz default clock_timestamp())
returns table (state text, reason text, explanation text, details jsonb)
language plpgsql stable
-- profile: nested
as $$
declare
  w record; c record; k record; v_state text;
begin
  select * into w from tallybook._whereabouts(why.job_id);
  if w.place is null then
    return query select null::text, r.* from tallybook._why_unknown(why.job_id) r;
    return;
  end if;
  if w.place = 'dead' or w.state is not null then
    return query select r.* from tallybook._why_ended(why.job_id, w.place, w.state, coalesce(w.ended_at, w.since),
                                                      w.reason, w.error, w.attempt) r;
    return;
  end if;
  select x.* into k from tallybook._cancel_of(why.job_id, w.attempt) x;
  if w.place = 'entry' then
    select x.worker_id, x.claimed_at into c from tallybook._claim_of(w.lane_id, w.retention, w.xid, w.seq) x
           where x.lease is not null;
    if found then
      return query select 'running'::text, r.* from tallybook._why_running(why.job_id, w.task, w.attempt, w.unique_key,
          c.worker_id, c.claimed_at, k.created_at, k.reason, why.at) r;
      return;
    end if;
  end if;
  if k.created_at is not null then
    return query select 'cancelled'::text, 'cancel_pending'::text,
      format('It was cancelled at %s and will not start; whoever meets it in its line puts that on record.',
             tallybook._moment(k.created_at)),
      jsonb_strip_nulls(jsonb_build_object('since', k.created_at, 'reason', k.reason));
    return;
  end if;
  v_state := case when w.place = 'entry' then 'available' when w.place = 'waiting' then 'waiting' when w.failures > 0
    then 'retrying' else 'scheduled' end;
  return query
  select v_state, r.reason, r.explanation, r.details from (
    select x.*, 1 as part from tallybook._why_late(why.job_id, w.place, w.run_at, w.failures, w.unique_key, w.options,
                                                   w.error, why.at) x where w.place <> 'waiting'
    union all
    select x.*, 2 from tallybook._why_waiting(why.job_id, w.lane_id, w.task, w.order_key, w.fair_key, w.fair_seq,
                                              w.options, why.at) x where w.place = 'waiting'
    union all
    select x.*, 3 from tallybook._why_unserved(w.queue, w.part, w.task, w.options, why.at) x
    union all
    select x.*, 4 from tallybook._why_behind(w.queue, w.priority, w.lane_id, w.retention, w.retired, w.xid, w.seq,
                                             why.at) x where w.place = 'entry'
    union all
    select x.*, 5 from tallybook._why_start(why.job_id, w.place, w.queue, w.task, w.unique_key, w.order_key,
                                            w.expires_at, w.run_at, w.options, why.at) x) r
   order by r.part, r.place;
  if not found then
    return query select v_state, 'should_start'::text, 'Nothing holds it: it should start at any moment.'::text,
           '{}'::jsonb;
  end if;
end $$;

-- _moment(at): an instant for people, to the second.
create or replace function tallybook._moment(p_at timestamptz) returns text
language sql stable as $$ select date_trunc('second', p_at)::text $$;

-- _others(n, most): a number of other jobs, for people, that was counted up to a bound.
create or replace function tallybook._others(p_n bigint, p_most int) returns text
language sql immutable as $$
  select case when p_n >= p_most then 'at least ' || ltrim(to_char(p_most, '999,999,999')) || ' others'
              when p_n = 0 then 'no others' when p_n = 1 then '1 other'
                   else ltrim(to_char(p_n, '999,999,999')) || ' others' end
$$;

-- _why_unknown(job_id): of a job that lies nowhere. A subject's end outlives its history.
create or replace function tallybook._why_unknown(p_job_id bigint, out reason text, out explanation text,
  out details jsonb) returns setof record
language plpgsql stable
-- profile: hot
as $$
declare
  s tallybook.subject_job;
begin
  select x.* into s from tallybook.subject_job x where x.job_id = p_job_id and x.ended_at is not null limit 1;
  if found then
    reason := 'history_gone';
    explanation := format('The subject %s has ended as %s at %s; what its job did has left the history.',
                          to_json(s.subject), s.ended_as, tallybook._moment(s.ended_at));
    details := jsonb_build_object('subject', s.subject, 'task', s.task, 'ended_as', s.ended_as, 'ended_at', s.ended_at);
  else
    reason := 'unknown';
    explanation := format('There is no job %s: its transaction has not committed or was rolled back, or it has ended '
                          'and left the history.', p_job_id);
    details := '{}';
  end if;
  return next;
end $$;

-- _why_ended(job_id, place, state, ended_at, reason, error, attempt): of a job whose newest attempt has ended and that
-- goes on nowhere.
create or replace function tallybook._why_ended(p_job_id bigint, p_place text, p_state text, p_ended_at timestamptz,
  p_reason text, p_error jsonb, p_attempt int, out state text, out reason text, out explanation text,
  out details jsonb) returns setof record
language plpgsql stable as $$
declare
  v_message text := left(p_error ->> 'message', 200);
begin
  details := jsonb_build_object('since', p_ended_at, 'attempt', p_attempt);
  if p_place = 'dead' then
    state := 'dead'; reason := 'dead';
    details := details || jsonb_strip_nulls(jsonb_build_object('reason', p_reason, 'error', p_error - 'traceback'));
    explanation := format('It is dead since %s, %s: a person can retry it.', tallybook._moment(p_ended_at),
      case p_reason when 'failed' then 'out of attempts' when 'crashed' then 'since it took its workers with it'
                    when 'expired' then 'since it had not started by its expires_at' else 'killed by its handler' end
      || case when v_message is not null and p_reason in ('failed', 'killed') then ': ' || v_message else '' end);
  elsif p_state = 'completed' then
    state := 'completed'; reason := 'completed'; explanation := format('It completed at %s.',
        tallybook._moment(p_ended_at));
  elsif p_state = 'cancelled' then
    state := 'cancelled'; reason := 'cancelled'; details := details
      || jsonb_strip_nulls(jsonb_build_object('reason', p_error ->> 'message'));
    explanation := format('It was cancelled at %s', tallybook._moment(p_ended_at)) || coalesce(': ' || v_message, '')
      || '.';
  else
    reason := 'dropped'; details := details || jsonb_strip_nulls(jsonb_build_object('error', p_error - 'traceback'));
    explanation := format('It died at %s, and its dead letter was dropped.', tallybook._moment(p_ended_at));
  end if;
  return next;
end $$;

-- _why_running(job_id, task, attempt, unique_key, worker, claimed_at, cancelled_at, cancel_reason, at): of a job that a
-- claim has taken.
create or replace function tallybook._why_running(p_job_id bigint, p_task text, p_attempt int, p_unique_key text,
  p_worker int, p_claimed_at timestamptz, p_cancelled_at timestamptz, p_cancel_reason text, p_at timestamptz,
  out reason text, out explanation text, out details jsonb) returns setof record
language plpgsql stable
-- profile: hot
as $$
declare
  k tallybook.worker; g tallybook.progress;
begin
  select x.* into k from tallybook.worker x where x.id = p_worker;
  select x.* into g from tallybook.progress x where x.job_id = p_job_id and x.attempt = p_attempt;
  reason := 'running';
  explanation := format('It runs on worker %s since %s, attempt %s', to_json(coalesce(k.name, p_worker::text)),
                        tallybook._moment(p_claimed_at), p_attempt)
    || coalesce(': ' || round((g.done * 100)::numeric) || ' %', '') || '.';
  details := jsonb_strip_nulls(jsonb_build_object('worker', k.name, 'worker_id', p_worker, 'since', p_claimed_at,
                                                  'attempt', p_attempt, 'progress', g.done, 'message', g.message));
  return next;
  if k.id is null or k.ended_at is not null or k.gone_at is not null or k.seen_at < p_at - k.lease then
    reason := 'worker_silent';
    details := jsonb_strip_nulls(jsonb_build_object('worker', k.name, 'worker_id', p_worker, 'seen_at',
                                                    nullif(k.seen_at, '-infinity'), 'gone_at', k.gone_at, 'lease',
                                                    k.lease));
    explanation := format('Its worker is silent%s: rescue puts the job back in line once that is certain.',
                          coalesce(' since ' || tallybook._moment(nullif(k.seen_at, '-infinity')), ''));
    return next;
  end if;
  if p_cancelled_at is not null then
    reason := 'cancelling'; details := jsonb_strip_nulls(jsonb_build_object('since', p_cancelled_at, 'reason',
        p_cancel_reason));
    explanation := format('It was cancelled at %s while it ran: its worker is told with its next heartbeat, and stops '
                          'it.', tallybook._moment(p_cancelled_at));
    return next;
  end if;
  if p_unique_key is not null and (tallybook._amendment_state(p_job_id, p_task, tallybook._crowd())).busy then
    reason := 'busy'; explanation :=
      'A producer''s open transaction changes it or relies on it, or does so with hundreds of jobs of its task: it '
      'starts when that has ended, if it has not started before.'; details := '{}';
    return next;
  end if;
end $$;
