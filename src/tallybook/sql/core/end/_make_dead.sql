-- _make_dead(entry, reason, at): keep a job that is out of attempts as a dead letter.
--
-- Enqueues what its task's on_dead names, in the same transaction, with what a person or a program has to know. A job
-- whose task is somebody's on_dead brings forth no other, so that no chain of deaths is endless. Frees its order key; a
-- subject's end goes on record.
create or replace function tallybook._make_dead(e tallybook.entry, p_reason text, p_at timestamptz) returns void
language plpgsql as $$
declare
  t tallybook.task := tallybook._task_of(e.task);
begin
  insert into tallybook.dead (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, reason,
                              task, args, headers, unique_key, errors, expires_at, order_key, options)
  values (e.job_id, p_at, e.enqueued_at, e.lane_id, e.attempt, e.failures, e.crashes, e.max_attempts, p_reason, e.task,
          e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key, e.options);
  if e.options ? 'subject' then
    perform tallybook._subject_ended(e, case p_reason when 'killed' then 'killed'
                                     else 'dead' end, p_at, e.failures, e.errors -> -1);
  end if;
  if t.on_dead_task is not null and not exists (select from tallybook.task k where k.on_dead_task in (e.task, t.name))
     then
    perform tallybook._put(nextval('tallybook.job_id'), coalesce(t.on_dead_queue, 'default'), t.on_dead_task,
      jsonb_build_object('job', e.job_id, 'task', e.task, 'args', e.args, 'failures', e.failures,
                         'error', coalesce(e.errors -> -1, '{}') || jsonb_build_object('reason', p_reason)),
      null, 2, null, null, e.headers, p_at);
  end if;
  if e.order_key is not null then perform tallybook._release(e.order_key, e.job_id, p_at); end if;
  perform tallybook._parent_ended(e.job_id);
end $$;
