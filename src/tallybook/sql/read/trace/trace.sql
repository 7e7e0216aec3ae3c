-- trace(subject, unique_key, links, job, task, max_events, newest_first): list the events of a subject, a unique key,
-- links or a job, in all queues, in order of time.
--
-- Pass exactly one of:
--   subject     the jobs of this subject
--   unique_key  the jobs with this unique key
--   links       the jobs with all of these links: {"submission": 42}
--   job         one job
-- and optionally:
--   task          only this task; null: all
--   max_events    the newest events, 1 to 10,000
--   newest_first  reverse the order; the events are the same
-- event: enqueued, scheduled (details.run_at is the time), waiting, started, completed, failed, snoozed, moved (set
-- aside or held before it started), lost (its worker died), cancelling (requested, not done yet), cancelled, dead,
-- retried (by a person). details depends on the event: the args of enqueued, and of started if they have changed; a
-- result; a reason. error: of failed, lost, dead.
-- Deleted history is not in it. Of more than 1,000 jobs the newest 1,000 are used.
-- Errors: TB005 none or several of the four, a number out of range, more than 10,000 jobs with these links.
-- Reads unique_key, subject_job, entry, claim, outcome, scheduled, waiting, dead, tombstone, worker, by indexes only.
-- profile: nested
-- rights: operator
create or replace function tallybook.trace(subject text default null, unique_key text default null,
  links jsonb default null, job bigint default null, task text default null, max_events int default 1000,
  newest_first boolean default false)
returns table (at timestamptz, job_id bigint, queue text, task_name text, attempt int, event text, worker text,
  details jsonb, error jsonb) language plpgsql stable as $$
declare v_jobs bigint[];
begin
  perform tallybook._refuse(num_nonnulls(trace.subject, trace.unique_key, trace.links, trace.job) <> 1,
            'trace needs exactly one thing to follow', 'Pass a subject, a unique_key, links or a job.');
  perform tallybook._check_range('max_events', max_events::text, max_events between 1 and 10000,
                                 'It must be from 1 to 10000.');
  if trace.links is not null then
    perform tallybook._check_links(trace.links);
    v_jobs := array(select l from tallybook._linked(trace.links, 10001) l);
    perform tallybook._refuse(cardinality(v_jobs) > 10000, 'more than 10,000 jobs have these links',
              'Pass one more link, or query fewer jobs yourself.');
  else
    v_jobs := case when trace.job is not null then array[trace.job]
                   else tallybook._of_name(trace.subject, trace.unique_key, trace.task) end;
  end if;
  return query
  select f.at, f.job_id, f.queue, f.task, f.attempt, f.event, f.worker, f.details, f.error from (
    select e.*, row_number() over (order by e.at desc, e.job_id desc, e.attempt desc, e.place desc) as back
      from (select j from unnest(v_jobs) j order by j desc limit 1000) j(id), lateral (
        with tries as materialized (
          select t.*, lag(t.state) over (order by t.attempt) as was, lag(t.args) over (order by t.attempt) as old_args,
                 coalesce(lag(t.ended_at) over (order by t.attempt),
                          case when t.attempt = 1 then t.enqueued_at end) as before
            from (select e.attempt, e.task, e.args, e.enqueued_at, e.run_at, e.crashes, l.queue, o.state, o.ended_at,
                         o.error, o.result, c.claimed_at,
                         (select k.name from tallybook.worker k where k.id = c.worker_id) as worker
                    from ((select x.* from tallybook.entry x where x.job_id = j.id and x.attempt > 1
                           order by x.attempt desc limit max_events)
                          union all
                          (select x.* from tallybook.entry x where x.job_id = j.id and x.attempt = 1 limit 1)) e
                    cross join lateral (select n.queue from tallybook.lane n where n.lane_id = e.lane_id) l
                    left join lateral tallybook._outcome_of(e.retention, e.xid, e.seq) o on true
                    left join lateral (select x.claimed_at, x.worker_id
                                       from tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) x
                                        where x.worker_id is not null) c on true) t
        ), now as materialized (select n.* from tallybook._job_place(j.id) n)
        -- Enqueued: as in the oldest record.
        select f.enqueued_at, j.id, f.queue, f.task, 1, 0, 'enqueued', null::text, jsonb_build_object('args', f.args),
               null::jsonb
          from (select t.enqueued_at, t.queue, t.task, t.args, t.attempt from tries t
                union all
                select n.enqueued_at, n.queue, n.task, n.args, n.attempt from now n where n.place <> 'entry' order by 5
                       limit 1) f
        union all
        select k.at, j.id, t.queue, t.task, t.attempt, k.place, k.event, k.worker, k.details, k.error
          from tries t, lateral (
            select t.run_at as at, 1 as place, 'retried' as event, null as worker, null::jsonb as details,
                   null::jsonb as error
             -- null: a dead letter's cancel
             where (t.was in ('dead', 'cancelled') or t.was = 'lost' and t.crashes = 0) and t.run_at is not null
            union all
            select t.before, 2, 'scheduled', null, jsonb_build_object('run_at', t.run_at), null
             where t.run_at > t.before and coalesce(t.was, 'failed') not in ('dead', 'cancelled', 'moved')
                   and not (t.was = 'lost' and t.crashes = 0)
            union all
            select t.claimed_at, 3, 'started', t.worker, case when t.args <> t.old_args
                   then jsonb_build_object('args', t.args) end, null
             where t.claimed_at is not null and t.state is distinct from 'moved'
            union all
            select t.ended_at, 4, t.state::text, case when t.claimed_at is not null then t.worker end,
                   case when t.result is not null then jsonb_build_object('result', t.result)
                        when t.state = 'cancelled' then jsonb_build_object('reason', t.error ->> 'message') end,
                   case when t.state <> 'cancelled' then t.error end
             where t.state is not null) k
        union all
        -- Where it is now, if no attempt shows it.
        select case n.place when 'scheduled' then coalesce((select max(t.ended_at) from tries t), n.enqueued_at)
               else n.since end, j.id, n.queue, n.task, n.attempt, 5, n.place, null,
               case n.place when 'scheduled' then jsonb_build_object('run_at', n.run_at)
                 when 'dead' then jsonb_build_object('reason', n.reason)
                 else nullif(jsonb_strip_nulls(jsonb_build_object(
                        'order_key', n.order_key, 'fair_key', n.fair_key, 'held', n.options -> 'held')), '{}') end,
               case n.place when 'dead' then n.error end
          from now n
         where n.place in ('scheduled', 'waiting') or n.place = 'dead'
               and not exists (select from tries t where t.attempt = n.attempt and t.state = 'dead')
        union all
        select x.created_at, j.id, n.queue, n.task, n.attempt, 6, 'cancelling', null,
               jsonb_build_object('reason', x.reason), null
          from now n, lateral tallybook._cancel_of(j.id, n.attempt) x
         where n.state is null and n.place <> 'dead'
        union all
        -- A subject's job of which only this is left.
        select s.ended_at, j.id, s.queue, s.task, coalesce(s.attempts, 1), 7, case s.ended_as when 'completed'
               then 'completed' else 'dead' end, null,
               jsonb_build_object('reason', s.ended_as, 'args', s.args), s.error
          from tallybook.subject_job s
         where s.job_id = j.id and s.ended_at is not null and not exists (select from now))
           e(at, job_id, queue, task, attempt, place, event, worker, details, error)
     where trace.task is null or e.task = trace.task) f
   where f.back <= max_events
   order by case when newest_first then f.back else -f.back end;
end $$;

-- _of_name(subject, unique_key, task): the jobs of a subject or a unique key, the newest 1000 of each task,
-- of one task or of all. Goes from task to task by the index.
create or replace function tallybook._of_name(p_subject text, p_key text, p_task text) returns bigint[]
language plpgsql stable as $$
declare
  v_task text := ''; v_jobs bigint[] := array(
    select e.job_id from tallybook.entry e
     where e.unique_key = p_subject and e.attempt = 1 and e.options ? 'subject' and (p_task is null or e.task = p_task)
           limit 10000);
begin
  loop
    v_task := case when p_task is not null then case when v_task = '' then p_task end
                   when p_subject is not null then (select s.task from tallybook.subject_job s where s.task > v_task
                                                    order by s.task limit 1)
                   else (select u.task from tallybook.unique_key u where u.task > v_task order by u.task limit 1) end;
    exit when v_task is null;
    v_jobs := v_jobs
      || array(select s.job_id from tallybook.subject_job s where s.task = v_task and s.subject = p_subject)
      || array(select u.job_id from tallybook.unique_key u
                where u.task = v_task and u.key = p_key order by u.generation desc limit 1000);
  end loop;
  return array(select distinct j from unnest(v_jobs) j);
end $$;
