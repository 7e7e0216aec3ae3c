-- _subject_end(lease, job_id, attempt, state, error, args, at, version): end one attempt of a subject's job. Returns
-- its entry with one more iteration and the new args, for the next attempt. Null: the lease no longer holds the
-- attempt, and the caller must do nothing else.
--
-- Errors: TB005 it is not a subject's job, or the args do not fit. Reads claim, entry; writes outcome, tally,
-- amendment.
create or replace function tallybook._subject_end(p_lease uuid, p_job_id bigint, p_attempt int,
  p_state tallybook.ending, p_error jsonb, p_args jsonb, p_at timestamptz,
  p_version int default null) returns tallybook.entry
language plpgsql as $$
declare e tallybook.entry;
begin
  if p_args is not null then perform tallybook._check_args(p_args, null); end if;
  if p_version is not null then perform tallybook._check_options(null, null,
                                                                 jsonb_build_object('version', p_version)); end if;
  e := tallybook._end(p_lease, p_job_id, p_attempt, p_state, p_error, p_at);
  if e.job_id is null then return null; end if;
  perform tallybook._refuse((e.options ? 'subject') is not true, format('job %s is no subject''s job', p_job_id),
    'Only a job of subject_push, subject_append or subject_upsert is repeated; end this one with complete, fail '
    'or snooze.');
  if p_args is not null then
    e.args := p_args;
    if p_version is not null then
      e.options := tallybook._versioned(e.options, case when p_version <> 1 then to_jsonb(p_version) end);
    end if;
  end if;
  e.options := tallybook._subject_iterated(e.options, p_at);
  return e;
end $$;

-- _subject_iterated(options, at): the options of a subject's job that has done one more iteration.
create or replace function tallybook._subject_iterated(p_options jsonb, p_at timestamptz) returns jsonb
language sql stable as $$
  select jsonb_set(p_options, '{subject}', (p_options -> 'subject') || jsonb_build_object(
    'iterations', (p_options #>> '{subject,iterations}')::int + 1, 'last_at', p_at))
$$;

-- _subject_ended(entry, as, at, failures, error): record how a subject has ended, with the facts that outlive its job's
-- history.
-- Nothing, where the name has been given to another job since. attempts: of its last iteration.
create or replace function tallybook._subject_ended(e tallybook.entry, p_as text, p_at timestamptz, p_failures int,
  p_error jsonb)
returns void language sql as $$
  update tallybook.subject_job j
     set ended_as = p_as, ended_at = p_at, queue = l.queue, priority = l.priority, args = e.args,
         attempts = tallybook._subject_attempts(e.job_id, e.attempt, e.options), failures = p_failures, error = p_error,
         iterations = (e.options #>> '{subject,iterations}')::int,
         last_at = (e.options #>> '{subject,last_at}')::timestamptz
    from tallybook.lane l
   where j.task = e.task and j.subject = e.unique_key and j.job_id = e.job_id and l.lane_id = e.lane_id
$$;

-- _subject_lives(task, subject, job_id, new): forget how a subject has ended: it continues in this job, or in a new
-- one; or its end does not count, like that of a cancelled job. Does nothing if another job has the name since.
create or replace function tallybook._subject_lives(p_task text, p_subject text, p_job_id bigint,
  p_new bigint default null) returns void
language sql as $$
  update tallybook.subject_job j
     set job_id = coalesce(p_new, p_job_id), ended_as = null, ended_at = null, last_at = null, priority = null,
         iterations = null, attempts = null, failures = null, queue = null, args = null, error = null
   where j.task = p_task and j.subject = p_subject and j.job_id = p_job_id
$$;

-- _subjects_completed(job_ids): the same for those of these jobs that are subjects' and were completed by a plain
-- complete.
create or replace function tallybook._subjects_completed(p_job_ids bigint[]) returns void
language plpgsql as $$
declare v_id bigint; e tallybook.entry; v_at timestamptz;
begin
  if not exists (select from tallybook.subject_job) then return; end if;
  -- One at a time: the index of (task, subject) would give the order as well, and all of them.
  for v_id in select j.job_id from unnest(p_job_ids) u(id) cross join lateral (
                select k.job_id, k.task, k.subject from tallybook.subject_job k
                 where k.job_id = u.id and k.ended_as is null limit 1) j order by j.task, j.subject loop
    e := tallybook._newest_entry(v_id);
    select o.ended_at into v_at from tallybook._outcome_of(e.retention, e.xid, e.seq) o where o.state = 'completed';
    continue when not found;  -- it was refused
    e := tallybook._amended(e, v_at);
    e.options := tallybook._subject_iterated(e.options, v_at);
    perform tallybook._subject_ended(e, 'completed', v_at, 0, null);
  end loop;
end $$;

-- _subject_retaken(entry, at): what follows for its subject from another attempt that a person gives a job.
-- Errors: TB005 the name belongs to another job now.
create or replace function tallybook._subject_retaken(e tallybook.entry,
  p_at timestamptz default clock_timestamp()) returns void
language plpgsql as $$
declare v_other bigint; v_state text; v_scope text := coalesce(e.options #>> '{subject,scope}', '');
begin
  loop
    insert into tallybook.subject_job (task, subject, scope, job_id, made_at)
    values (e.task, e.unique_key, v_scope, e.job_id, p_at) on conflict do nothing;
    if found then return; end if;
    select j.job_id, j.ended_as into v_other, v_state from tallybook.subject_job j
     where j.task = e.task and j.subject = e.unique_key and j.scope = v_scope for update;
    continue when not found;
    if v_other <> e.job_id then
      if v_state is null then select n.state into v_state from tallybook._subject_now(v_other, p_at) n; end if;
      perform tallybook._refuse(v_state is not null,
        format('job %s is the subject %s now', v_other, to_json(e.unique_key)),
        'Forget that subject first, or leave this job.');
    end if;
    perform tallybook._subject_lives(e.task, e.unique_key, v_other, e.job_id);
    return;
  end loop;
end $$;
