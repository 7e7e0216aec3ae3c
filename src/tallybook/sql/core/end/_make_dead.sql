-- _make_dead(entry, reason, at): store a job that is out of attempts as a dead letter.
--
-- Enqueues the task's on_dead job in the same transaction. Frees its order key, and records a subject's end.
-- Writes dead, subject_job; see _enqueue_on_dead and _release.
create or replace function tallybook._make_dead(e tallybook.entry, p_reason text, p_at timestamptz) returns void
language plpgsql as $$
begin
  insert into tallybook.dead (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, reason,
                              task, args, headers, unique_key, errors, expires_at, order_key, options)
  values (e.job_id, p_at, e.enqueued_at, e.lane_id, e.attempt, e.failures, e.crashes, e.max_attempts, p_reason, e.task,
          e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key, e.options);
  if e.options ? 'subject' then
    perform tallybook._subject_ended(e, case p_reason when 'killed' then 'killed'
                                     else 'dead' end, p_at, e.failures, e.errors -> -1);
  end if;
  perform tallybook._enqueue_on_dead(e, p_reason, p_at);
  if e.order_key is not null then perform tallybook._release(e.order_key, e.job_id, p_at); end if;
  perform tallybook._parent_ended(e.job_id);
end $$;
