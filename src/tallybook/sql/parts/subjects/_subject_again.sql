-- _subject_again(task, subject, job_id, revive, at): give the name of a subject to a new job, if it has completed
-- (revive, its iterations continue), or its job was cancelled. Null: it has changed, look again.
--
-- The row of the name is locked first, and looked at once more behind the lock: a person's retry takes it too.
-- Returns the new job's id and the subject's part of its options. Errors: TB005 cancelled in this transaction.
-- profile: nested
create or replace function tallybook._subject_again(p_task text, p_subject text, p_job_id bigint, p_revive boolean,
  p_at timestamptz, out job_id bigint, out subject jsonb)
language plpgsql
set enable_nestloop = on  -- also where the caller has it off
as $$
declare k tallybook.subject_job; w record;
begin
  select x.* into k from tallybook.subject_job x where x.task = p_task and x.subject = p_subject
         and x.job_id = p_job_id for update;
  if not found then return; end if;
  if k.ended_as is null then
    perform tallybook._pick_waited(p_job_id);  -- a pick may have taken it before it was cancelled
    select n.state, n.options into w from tallybook._subject_now(p_job_id, p_at) n;
    if (w.state is distinct from case when p_revive then 'completed' end) then return; end if;
    perform tallybook._refuse(true,
      format('job %s was cancelled in this transaction and may have started: its subject is not free yet', p_job_id),
      'Commit the cancel first, or use subject_forget.') from tallybook.tombstone t
      where t.job_id = p_job_id and t.cancelled and t.xid = pg_current_xact_id_if_assigned();
    subject := case when p_revive then (w.options -> 'subject') - 'from' else '{"iterations": 0}' end;
  elsif p_revive and k.ended_as = 'completed' then
    subject := jsonb_build_object('iterations', k.iterations, 'last_at', k.last_at);
  else
    return;
  end if;
  job_id := nextval('tallybook.job_id');
  perform tallybook._subject_lives(p_task, p_subject, p_job_id, _subject_again.job_id);
  if not p_revive then
    update tallybook.subject_job x set made_at = p_at where x.task = p_task and x.subject = p_subject
           and x.job_id = _subject_again.job_id;
  end if;
end $$;
