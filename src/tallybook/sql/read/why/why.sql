-- why(job_id, at): explain why a job is not running, or how it ended. Returns one row per reason, in the order in which
-- they have to be resolved.
--
--   state        as in the view tallybook.job; null: unknown job
--   reason       a short code; should_start: nothing prevents the start. All codes:
--                https://github.com/tallybook/tallybook/blob/main/docs/why.md
--   explanation  one sentence for people
--   details      for programs: times, keys, ids, numbers. more: true if the count was cut off
-- Running, ended and unknown jobs have a reason, too. An available job can have several; all that are known now are
-- returned. Limits are checked again at the claim, so a reason about a limit holds only for this moment.
-- Uses one snapshot and index look-ups; counts at most 10,000 jobs and lists at most 10 names. Locks a job with a
-- unique key for a microsecond, to see whether a producer is changing it. `at` replaces the time in tests.
-- Reads scheduled, waiting, dead, entry, claim, outcome, tombstone, amendment, lane, queue, worker, parent, order_line,
-- order_turn, progress, limit_rule, rate_state, concurrency_holder, concurrency_line,
-- breaker_state, service, subject_job.
-- profile: nested
-- rights: operator
create or replace function tallybook.why(job_id bigint, at timestamptz default clock_timestamp())
returns table (state text, reason text, explanation text, details jsonb) language plpgsql stable as $$
declare
  w tallybook._job_place; k tallybook.tombstone; r tallybook.worker; c record; v_state text; v_open boolean;
  v_expired boolean;
begin
  select * into w from tallybook._job_place(why.job_id);
  v_open := w.place <> 'dead' and w.state is null;
  select x.* into k from tallybook._cancel_of(w.job_id, w.attempt) x where v_open;
  select x.worker_id, x.claimed_at into c from (select) o
    left join lateral tallybook._claim_of(w.lane_id, w.retention, w.xid, w.seq) x on v_open and w.place = 'entry';
  select x.* into r from tallybook.worker x where x.id = c.worker_id;
  v_state := case when w.place = 'dead' then 'dead' when w.state in ('completed', 'cancelled') then w.state
                  when v_open is not true then null when c.claimed_at is not null then 'running'
                  when k.created_at is not null then 'cancelled' when w.place = 'entry' then 'available'
                  when w.place = 'waiting' then 'waiting' when w.failures > 0 then 'retrying' else 'scheduled' end;
  v_open := coalesce(v_open and v_state not in ('running', 'cancelled'), false);
  v_expired := coalesce(w.expires_at <= greatest(why.at, case when w.place = 'scheduled' then w.run_at end), false);
  return query
  select v_state, x.reason, x.explanation, jsonb_strip_nulls(x.details) from (
    select 1, x.* from tallybook._why_ended(w, why.job_id) with ordinality x
     where w.place is null or w.place = 'dead' or w.state is not null
    union all
    select 2, 'running', format('It runs on worker %s since %s, attempt %s%s.',
                                to_json(coalesce(r.name, c.worker_id::text)), tallybook._moment(c.claimed_at),
                                w.attempt, ': ' || round((g.done * 100)::numeric) || ' %'),
           jsonb_build_object('worker', r.name, 'worker_id', c.worker_id, 'since', c.claimed_at, 'attempt', w.attempt,
                              'progress', g.done, 'message', g.message), 1
      from (select) o left join tallybook.progress g on g.job_id = w.job_id and g.attempt = w.attempt
     where v_state = 'running'
    union all
    select 3, 'worker_silent', format('Its worker has sent no heartbeat%s. Once it is dead, rescue returns the job '
                                      'to its queue.', ' since ' || tallybook._moment(nullif(r.seen_at, '-infinity'))),
           jsonb_build_object('worker', r.name, 'worker_id', c.worker_id, 'seen_at', nullif(r.seen_at, '-infinity'),
                              'gone_at', r.gone_at, 'lease', r.lease), 1
     where v_state = 'running' and (r.id is null or r.ended_at is not null or r.gone_at is not null
                                    or r.seen_at < why.at - r.lease)
    union all
    select 4, 'cancelling', format('It was cancelled while it ran, at %s. Its worker stops it at its next heartbeat.',
                                   tallybook._moment(k.created_at)),
           jsonb_build_object('since', k.created_at, 'reason', k.reason), 1
     where v_state = 'running' and k.created_at is not null
    union all
    select 5, 'cancel_pending', format('It was cancelled at %s and will not start. Its end is not recorded yet.',
                                       tallybook._moment(k.created_at)),
           jsonb_build_object('since', k.created_at, 'reason', k.reason), 1
     where v_state = 'cancelled' and w.state is null
    union all
    select 6, x.* from tallybook._why_late(w, why.at) with ordinality x where v_open and v_state <> 'waiting'
    union all
    select 7, x.* from tallybook._why_waiting(w, why.at) with ordinality x where v_state = 'waiting'
    union all
    select 8, x.* from tallybook._why_unserved(w, why.at) with ordinality x where v_open
    union all
    select 9, x.* from tallybook._why_behind(w) with ordinality x where v_state = 'available'
    union all
    select 10, 'expired', format('It expired at %s, so it does not start. The next claim makes it a dead letter.',
                                tallybook._moment(w.expires_at)), jsonb_build_object('since', w.expires_at), 1
     where v_open and v_expired
    union all
    select 11, x.* from tallybook._why_order(w.job_id, w.order_key) with ordinality x
     where v_state = 'available' and w.order_key is not null and not v_expired
    union all
    select 12, x.* from tallybook._why_limits(w, why.at) with ordinality x where v_open and not v_expired
    union all
    select 13, 'busy', format('A producer''s open transaction has changed it or enqueued with its unique key, or has '
                              'changed more than 128 jobs of its task. It starts when that transaction has ended%s.',
                              case when v_state = 'running' then ', if it has not started before' end), '{}', 1
     where (v_state = 'running' or v_open and not v_expired) and w.unique_key is not null
           and (tallybook._amendment_state(w.job_id, w.task, tallybook._crowd())).busy
    ) x(part, reason, explanation, details, place)
   order by x.part, x.place;
  if not found then
    return query select v_state, 'should_start', 'Nothing prevents it: it should start at any moment.', '{}'::jsonb;
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
language sql immutable as $$ select jsonb_build_object('before', p_n, 'more', case when p_n >= 10000 then true end) $$;

-- _why_ended(place, job_id): the answer for a job that has ended or is in no table. A subject's end outlives its
-- history.
create or replace function tallybook._why_ended(w tallybook._job_place, p_job_id bigint)
returns setof tallybook._reason language sql stable as $$
  select r.* from (
    select tallybook._moment(w.since) as at, left(w.error ->> 'message', 200) as said, w.error - 'traceback' as error,
           jsonb_build_object('since', w.since, 'attempt', w.attempt) as place) v, lateral (
    select 'history_gone', format('The subject %s ended as %s at %s; the history of its job has been deleted.',
                                  to_json(s.subject), s.ended_as, tallybook._moment(s.ended_at)),
           jsonb_build_object('subject', s.subject, 'task', s.task, 'ended_as', s.ended_as, 'ended_at', s.ended_at)
      from tallybook.subject_job s where w.place is null and s.job_id = p_job_id and s.ended_at is not null
    union all
    select 'unknown', format('There is no job %s. Its transaction has not committed or was rolled back, or it ended '
                             'and its history has been deleted.', p_job_id), '{}'
     where w.place is null and not exists (
       select from tallybook.subject_job s where s.job_id = p_job_id and s.ended_at is not null)
    union all
    select 'dead', format('It has been dead since %s, %s. You can retry it.', v.at,
             case w.reason when 'failed' then 'out of attempts' when 'crashed' then 'because it crashed its workers'
                           when 'expired' then 'because it had not started by its expires_at'
                           else 'killed by its handler' end
             || case when v.said is not null and w.reason in ('failed', 'killed') then ': ' || v.said else '' end),
           v.place || jsonb_build_object('reason', w.reason, 'error', v.error) where w.place = 'dead'
    union all
    select 'completed', format('It completed at %s.', v.at), v.place where w.state = 'completed'
    union all
    select 'cancelled', format('It was cancelled at %s%s.', v.at, ': ' || v.said),
           v.place || jsonb_build_object('reason', w.error ->> 'message') where w.state = 'cancelled'
    union all
    select 'dropped', format('It became a dead letter at %s, which was dropped.', v.at),
           v.place || jsonb_build_object('error', v.error) where w.state not in ('completed', 'cancelled')) r
$$;
