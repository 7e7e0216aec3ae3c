-- _why_unserved(queue, part, task, options, at): whether the queue is paused, and whether anybody is there who would
-- run this job. For why; part of its answer.
--
-- A worker without tasks is one of another language, which takes what comes. Reads queue, worker.
create or replace function tallybook._why_unserved(p_queue text, p_part text, p_task text, p_options jsonb,
  p_at timestamptz, out reason text, out explanation text, out details jsonb, out place int) returns setof record
language plpgsql stable
-- profile: hot
as $$
declare
  q tallybook.queue; k record; v_version text := case when p_options ->> 'version' ~ '^([2-9]|[1-9][0-9]{1,2})$'
    then p_options ->> 'version' end;
begin
  select x.* into q from tallybook.queue x where x.name = p_queue and x.paused_at is not null;
  if found then
    place := 1; reason := 'queue_paused'; details := jsonb_strip_nulls(jsonb_build_object('queue', p_queue, 'since',
        q.paused_at, 'by', q.paused_by));
    explanation := format('The queue %s is paused since %s, by %s.', to_json(p_queue), tallybook._moment(q.paused_at),
                          coalesce(q.paused_by, 'somebody'));
    return next;
  end if;
  select count(*) filter (where w.heard) as live, count(*) as known, max(nullif(w.seen_at, '-infinity')) as seen_at,
         bool_or(w.heard and case when p_part like 'task:%' or p_part like 'version:%' then p_part = any (w.parts)
                                  when w.tasks = '{}' then true
                                  when v_version is not null then format('version:%s:%s', v_version,
                                      p_task) = any (w.parts)
                                  else p_task = any (w.tasks) end) as knows,
         bool_or(w.heard and p_task = any (w.tasks)) as knows_task
    into k from (
    select x.tasks, x.parts, x.seen_at, x.seen_at >= p_at - x.lease and x.gone_at is null as heard
      from tallybook.worker x where x.ended_at is null and p_queue = any (x.queues)) w;
  place := 2;
  if k.live = 0 then
    reason := 'no_worker'; details := jsonb_strip_nulls(jsonb_build_object('queue', p_queue, 'silent',
        nullif(k.known, 0), 'seen_at', k.seen_at));
    explanation := format('No live worker serves the queue %s', to_json(p_queue))
      || case when k.seen_at is not null then format('; the last one was heard at %s', tallybook._moment(k.seen_at))
      else '' end || '.';
    return next;
  elsif not k.knows then
    reason := case when v_version is not null and (k.knows_task or p_part like 'version:%') then 'unknown_version'
      else 'unknown_task' end;
    details := jsonb_strip_nulls(jsonb_build_object('queue', p_queue, 'task', p_task, 'version', v_version::int,
                                                    'aside', case when p_part not in ('', 'turn', 'fair')
                                                    then true end));
    explanation := format('No live worker that serves the queue %s knows %s%s.', to_json(p_queue),
      case when reason = 'unknown_version' then format('version %s of the args of ', v_version)
           else 'the task ' end || to_json(p_task)::text,
      case when p_part not in ('', 'turn', 'fair') then '; it was put aside for one that does' else '' end);
    return next;
  end if;
end $$;
