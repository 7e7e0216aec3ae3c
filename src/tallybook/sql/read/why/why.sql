-- why(job_id, at): why a job does not run, or how it ended. One row per reason, in the order in which they have to be
-- solved.
--
--   state        as in the view tallybook.job; null: unknown job
--   reason       a short code; should_start: nothing prevents the start. All codes:
--                https://github.com/tallybook/tallybook/blob/main/docs/why.md
--   explanation  one sentence for people
--   details      for programs: times, keys, ids, numbers. more: true if the count was cut off
-- Running, ended and unknown jobs have a reason, too. A job in line can have several; all that are known now are
-- returned. A limit is checked at the claim, so its answer is the one of this moment.
-- Uses one snapshot and index look-ups; counts at most 10,000 jobs and lists at most 10 names. Takes a lock of a job
-- with a unique key for a microsecond, to see whether a producer changes it. `at` replaces the time in tests.
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
  w record; k tallybook.tombstone; v_worker int; v_claimed_at timestamptz; v_state text;
begin
  select * into w from tallybook._job_place(why.job_id);
  if w.place is null or w.place = 'dead' or w.state is not null then
    return query
    select case when w.place = 'dead' then 'dead' when w.state in ('completed', 'cancelled') then w.state end, r.reason,
           r.explanation, jsonb_strip_nulls(r.details) from tallybook._why_ended(w, why.job_id) r;
    return;
  end if;
  select x.* into k from tallybook._cancel_of(w.job_id, w.attempt) x;
  if w.place = 'entry' then
    select x.worker_id, x.claimed_at into v_worker, v_claimed_at
      from tallybook._claim_of(w.lane_id, w.retention, w.xid, w.seq) x;
  end if;
  if v_claimed_at is not null then
    return query select 'running'::text, r.reason, r.explanation, jsonb_strip_nulls(r.details)
                   from tallybook._why_running(w, v_worker, v_claimed_at, k.created_at, k.reason, why.at) r;
    return;
  end if;
  v_state := case when k.created_at is not null then 'cancelled' when w.place = 'entry' then 'available'
                  when w.place = 'waiting' then 'waiting' when w.failures > 0 then 'retrying' else 'scheduled' end;
  return query
  select v_state, r.reason, r.explanation, jsonb_strip_nulls(r.details) from (
    select 'cancel_pending', format('It was cancelled at %s and will not start. The next claim of its line '
                                    'records that.', tallybook._moment(k.created_at)),
           jsonb_build_object('since', k.created_at, 'reason', k.reason), 1, 1 where v_state = 'cancelled'
    union all
    select x.*, 2 from tallybook._why_late(w, why.at) x where v_state in ('available', 'scheduled', 'retrying')
    union all
    select x.*, 3 from tallybook._why_waiting(w, why.at) x where v_state = 'waiting'
    union all
    select x.*, 4 from tallybook._why_unserved(w, why.at) x where v_state <> 'cancelled'
    union all
    select x.*, 5 from tallybook._why_behind(w) x where v_state = 'available'
    union all
    select x.*, 6 from tallybook._why_start(w, why.at) x where v_state <> 'cancelled'
    ) r(reason, explanation, details, place, part)
   order by r.part, r.place;
  if not found then
    return query select v_state, 'should_start'::text, 'Nothing prevents it: it should start at any moment.'::text,
           '{}'::jsonb;
  end if;
end $$;

-- _moment(at): format a time for people, to the second.
create or replace function tallybook._moment(p_at timestamptz) returns text
language sql stable as $$ select date_trunc('second', p_at)::text $$;

-- _others(n): format a number of other jobs for people; 10,000 means at least that.
create or replace function tallybook._others(p_n bigint) returns text
language sql immutable as $$
  select case when p_n >= 10000 then 'at least 10,000 others' when p_n = 0 then 'no others' when p_n = 1 then '1 other'
              else ltrim(to_char(p_n, '9,999')) || ' others' end
$$;

-- _counted_before(n): the same number for programs.
create or replace function tallybook._counted_before(p_n bigint) returns jsonb
language sql immutable as $$
  select jsonb_build_object('before', p_n, 'more', case when p_n >= 10000 then true end)
$$;

-- _why_ended(place, job_id): the answer for a job that has ended or is in no table. A subject's end outlives its
-- history.
create or replace function tallybook._why_ended(w record, p_job_id bigint) returns setof tallybook._reason
language plpgsql stable
-- profile: hot
as $$
declare
  s tallybook.subject_job; v_at text := tallybook._moment(w.since); v_said text := left(w.error ->> 'message', 200);
  v jsonb := jsonb_build_object('since', w.since, 'attempt', w.attempt);
begin
  if w.place is null then
    select x.* into s from tallybook.subject_job x where x.job_id = p_job_id and x.ended_at is not null limit 1;
    if found then
      return query
      select 'history_gone', format('The subject %s ended as %s at %s; the history of its job has been deleted.',
                                    to_json(s.subject), s.ended_as, tallybook._moment(s.ended_at)),
             jsonb_build_object('subject', s.subject, 'task', s.task, 'ended_as', s.ended_as, 'ended_at', s.ended_at),
             1;
    else
      return query
      select 'unknown', format('There is no job %s. Its transaction has not committed or was rolled back, or it '
                               'ended and its history has been deleted.', p_job_id), '{}'::jsonb, 1;
    end if;
  elsif w.place = 'dead' then
    return query
    select 'dead', format('It has been dead since %s, %s. You can retry it.', v_at,
             case w.reason when 'failed' then 'out of attempts' when 'crashed' then 'because it crashed its workers'
                           when 'expired' then 'because it had not started by its expires_at'
                           else 'killed by its handler' end
             || case when v_said is not null and w.reason in ('failed', 'killed') then ': ' || v_said else '' end),
           v || jsonb_build_object('reason', w.reason, 'error', w.error - 'traceback'), 1;
  elsif w.state = 'completed' then
    return query select 'completed', format('It completed at %s.', v_at), v, 1;
  elsif w.state = 'cancelled' then
    return query select 'cancelled', format('It was cancelled at %s%s.', v_at, ': ' || v_said),
                        v || jsonb_build_object('reason', w.error ->> 'message'), 1;
  else
    return query select 'dropped', format('It became a dead letter at %s, which was dropped.', v_at),
                        v || jsonb_build_object('error', w.error - 'traceback'), 1;
  end if;
end $$;

-- _why_running(place, worker, claimed_at, cancelled_at, cancel_reason, at): the answer for a claimed job.
create or replace function tallybook._why_running(w record, p_worker int, p_claimed_at timestamptz,
  p_cancelled_at timestamptz, p_cancel_reason text, p_at timestamptz) returns setof tallybook._reason
language plpgsql stable
-- profile: hot
as $$
declare
  k tallybook.worker; g tallybook.progress;
begin
  select x.* into k from tallybook.worker x where x.id = p_worker;
  select x.* into g from tallybook.progress x where x.job_id = w.job_id and x.attempt = w.attempt;
  return query
  select 'running', format('It runs on worker %s since %s, attempt %s%s.', to_json(coalesce(k.name, p_worker::text)),
                           tallybook._moment(p_claimed_at), w.attempt, ': ' || round((g.done * 100)::numeric) || ' %'),
         jsonb_build_object('worker', k.name, 'worker_id', p_worker, 'since', p_claimed_at, 'attempt', w.attempt,
                            'progress', g.done, 'message', g.message), 1;
  if k.id is null or k.ended_at is not null or k.gone_at is not null or k.seen_at < p_at - k.lease then
    k.seen_at := nullif(k.seen_at, '-infinity');
    return query
    select 'worker_silent', format('Its worker is silent%s. Rescue returns the job to its line if the worker is dead.',
                                   ' since ' || tallybook._moment(k.seen_at)),
           jsonb_build_object('worker', k.name, 'worker_id', p_worker, 'seen_at', k.seen_at, 'gone_at', k.gone_at,
                              'lease', k.lease), 2;
  end if;
  if p_cancelled_at is not null then
    return query
    select 'cancelling', format('It was cancelled while it ran, at %s. Its worker stops it at its next '
                                'heartbeat.', tallybook._moment(p_cancelled_at)),
           jsonb_build_object('since', p_cancelled_at, 'reason', p_cancel_reason), 3;
  end if;
  if w.unique_key is not null and (tallybook._amendment_state(w.job_id, w.task, tallybook._crowd())).busy then
    return query
    select 'busy', 'An open transaction of a producer changes it or depends on it, or on hundreds of jobs of its '
                   'task. It starts when that transaction has ended, if it has not started before.', '{}'::jsonb, 4;
  end if;
end $$;
