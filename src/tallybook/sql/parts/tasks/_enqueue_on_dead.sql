-- _enqueue_on_dead(entry, reason, at): enqueue the on_dead task of a dead job's task, with the facts for a person or a
-- program. If the dead job's task is itself an on_dead task, it has no follow-up, so chains end.
create or replace function tallybook._enqueue_on_dead(e tallybook.entry, p_reason text, p_at timestamptz) returns void
language plpgsql as $$
declare t tallybook.task := tallybook._task_of(e.task);
begin
  if t.on_dead_task is not null and not exists (select from tallybook.task k where k.on_dead_task in (e.task, t.name))
     then
    perform tallybook._put(nextval('tallybook.job_id'), coalesce(t.on_dead_queue, 'default'), t.on_dead_task,
      jsonb_build_object('job', e.job_id, 'task', e.task, 'args', e.args, 'failures', e.failures,
                         'error', coalesce(e.errors -> -1, '{}') || jsonb_build_object('reason', p_reason)),
      null, 2, null, null, e.headers, p_at);
  end if;
end $$;
