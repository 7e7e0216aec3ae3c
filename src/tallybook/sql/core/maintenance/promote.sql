-- promote(max_jobs, after, at, as_service): move due jobs from scheduled to their lanes. Any worker may run it.
--
-- Of jobs with the same time, those with fewer failures move first. after: the run_at that the last call reached, so
-- that this call skips dead rows that vacuum cannot remove yet because of an old snapshot. Pass null every few seconds,
-- for jobs that were committed late.
-- Returns how many jobs it moved, the run_at that it reached, and when the next is due (null: nothing is scheduled).
-- as_service: claim the run first, and record it (see _service.sql); promoted is null if another session is running it.
-- Skips rows that another session has locked. Without after, it also moves queued jobs that were changed to another
-- lane or time, and releases the next job of each order key whose first job was cancelled.
-- Of jobs that return for their turn at a limit, it moves only as many as can start; see _pace for the others.
-- max_jobs limits the rows that it reads, including those that get a later time.
-- Reads lane, tombstone, amendment, limit_rule; deletes from scheduled; writes entry, waiting, order_line, service,
-- scheduled, rate_state; see _apply_amendments and _release.
-- profile: hot
-- rights: worker
create or replace function tallybook.promote(max_jobs int default 1000, after timestamptz default null,
  at timestamptz default clock_timestamp(), as_service boolean default false, out promoted int,
  out last_run_at timestamptz, out next_run_at timestamptz) language plpgsql as $$
declare
  v_queues text[]; v_ids bigint[]; v_limited boolean; v_last timestamptz; v_fair boolean;
  v_keys text[]; v_ordered bigint[]; v_seqs bigint[];
begin
  if promote.after > at + interval '10 s' then promote.after := null; end if;  -- the clock has stepped back
  if as_service and not tallybook._service_claim('promote', at) then
    select s.run_at into next_run_at from tallybook.scheduled s
     where s.run_at >= coalesce(promote.after, '-infinity') order by s.run_at limit 1;
    return;
  end if;
  if promote.after is null then  -- every few seconds, or when told to
    -- what was cancelled while it held the line of its key
    if exists (select from tallybook.waiting w where w.order_key is not null) then
      perform tallybook._release(d.order_key, null, promote.at) from (
        select distinct k.order_key from tallybook.tombstone t, lateral (
                 select s.order_key from tallybook.scheduled s where s.job_id = t.job_id
                 union all
                 (select e.order_key from tallybook.entry e where e.job_id = t.job_id order by e.attempt desc
                  limit 1)) k
         where t.cancelled and k.order_key is not null limit 100) d;
    end if;
    perform tallybook._apply_amendments(at);
  end if;
  select array_agg(d.job_id), bool_or(d.turn), max(d.run_at) into v_ids, v_limited, v_last from (
    select s.job_id, s.run_at, coalesce(s.options ? 'turn', false) as turn from tallybook.scheduled s
     where s.run_at <= promote.at and s.run_at >= coalesce(promote.after, '-infinity')
     order by s.run_at limit max_jobs for update skip locked) d;
  if v_limited then v_ids := tallybook._pace(v_ids, at); end if;
  promoted := 0;
  if v_ids is not null then
    with gone as materialized (
      delete from tallybook.scheduled s where s.job_id = any (v_ids) returning s.*
    ), lined as (
      -- The numbers are drawn in the order of the line, whatever the plan of the join was.
      select o.*, nextval('tallybook.job_id') as seq,
             (o.options ? 'fair_key' and not o.options ? 'turn') is true as fair
        from (select g.*, l.queue, l.retention from gone g join tallybook.lane l on l.lane_id = g.lane_id
               order by g.run_at, g.failures, g.job_id) o
    ), put as (
      insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes,
        max_attempts, task, args, headers, unique_key, run_at, errors, expires_at, order_key, options)
      select p.seq, p.job_id, p.enqueued_at, case when p.options ? 'fair_key'
             then tallybook._lane_beside(p.lane_id, 'turn') else p.lane_id end, p.attempt, p.retention, p.failures,
             p.crashes, p.max_attempts, p.task, p.args, p.headers, p.unique_key, p.run_at, p.errors, p.expires_at,
             p.order_key, p.options
        from lined p where not p.fair
    ), fair as (  -- their turn among the keys of their queue comes later, see fair_release
      insert into tallybook.waiting (job_id, waits_since, enqueued_at, run_at, lane_id, attempt, failures, crashes,
        max_attempts, task, args, headers, unique_key, errors, expires_at, options, fair_key, fair_seq)
      select p.job_id, promote.at, p.enqueued_at, p.run_at, tallybook._lane_beside(p.lane_id, 'fair'), p.attempt,
             p.failures, p.crashes, p.max_attempts, p.task, p.args, p.headers, p.unique_key, p.errors, p.expires_at,
             p.options, p.options ->> 'fair_key', p.seq
        from lined p where p.fair
    )
    select count(*), array_agg(distinct p.queue) filter (where not p.fair), bool_or(p.fair),
           array_agg(p.order_key) filter (where p.order_key is not null),
           array_agg(p.job_id) filter (where p.order_key is not null),
           array_agg(p.seq) filter (where p.order_key is not null)
      into promoted, v_queues, v_fair, v_keys, v_ordered, v_seqs from lined p;
  end if;
  if v_keys is not null then perform tallybook._line_up_many(v_keys, v_ordered, v_seqs); end if;
  last_run_at := v_last;
  perform tallybook._wake(q) from unnest(v_queues) q;
  if v_fair then perform tallybook._wake(' fair_release'); end if;
  select s.run_at into next_run_at from tallybook.scheduled s
   where s.run_at >= coalesce(last_run_at, promote.after, '-infinity') order by s.run_at limit 1;
  if as_service then perform tallybook._service_ran('promote', at, promoted); end if;
end $$;
