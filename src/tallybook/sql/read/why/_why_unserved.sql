-- _why_unserved(place, at): whether the queue is paused, and whether a live worker would run this job. A part of why.
--
-- A worker without tasks is one in another language and runs all tasks. Reads queue, worker.
create or replace function tallybook._why_unserved(w tallybook._job_place, p_at timestamptz)
returns setof tallybook._reason language plpgsql stable as $$
declare
  k record; v_version text := (regexp_match(w.options ->> 'version', '^([2-9]|[1-9][0-9]{1,2})$'))[1];
  v_aside boolean := w.part not in ('', 'turn', 'fair');
begin
  return query
  select 'queue_paused', format('The queue %s has been paused since %s, by %s.', to_json(w.queue),
                                tallybook._moment(q.paused_at), coalesce(q.paused_by, 'somebody')),
         jsonb_build_object('queue', w.queue, 'since', q.paused_at, 'by', q.paused_by)
    from tallybook.queue q where q.name = w.queue and q.paused_at is not null;
  select count(*) filter (where x.heard) as live, count(*) as known, max(nullif(x.seen_at, '-infinity')) as seen_at,
         bool_or(x.heard and case when w.part like 'task:%' or w.part like 'version:%' then w.part = any (x.parts)
                                  when x.tasks = '{}' then true
                                  when v_version is not null
                                    then format('version:%s:%s', v_version, w.task) = any (x.parts)
                                  else w.task = any (x.tasks) end) as knows,
         bool_or(x.heard and w.task = any (x.tasks)) as knows_task
    into k from (
    select y.tasks, y.parts, y.seen_at, y.seen_at >= p_at - y.lease and y.gone_at is null as heard
      from tallybook.worker y where y.ended_at is null and w.queue = any (y.queues)) x;
  if k.live = 0 then
    return query
    select 'no_worker', format('No live worker serves the queue %s%s.', to_json(w.queue),
                               '; the last heartbeat was at ' || tallybook._moment(k.seen_at)),
           jsonb_build_object('queue', w.queue, 'silent', nullif(k.known, 0), 'seen_at', k.seen_at);
  elsif not k.knows then
    return query
    select x.reason, format('No live worker that serves the queue %s knows %s%s%s.', to_json(w.queue),
             case x.reason when 'unknown_version' then format('version %s of the args of ', v_version)
                           else 'the task ' end, to_json(w.task),
             case when v_aside then '; it waits for one that does' end),
           jsonb_build_object('queue', w.queue, 'task', w.task, 'version', v_version::int, 'aside',
                              nullif(v_aside, false))
      from (select case when v_version is not null and (k.knows_task or w.part like 'version:%')
                        then 'unknown_version' else 'unknown_task' end as reason) x;
  end if;
end $$;
