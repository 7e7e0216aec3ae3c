-- subject_forget(task, subject, at, queue): forget a subject that does not run: a later push creates a new one. For
-- people and producers.
--
-- Returns forgotten: the name is free. A planned or pending subject is cancelled first: its job will certainly not
-- start, and the caller may push the name again in the same transaction. active: it runs and is unchanged; cancel its
-- job first. unknown: there is no such subject.
--   queue  forget the subject that a push into this queue would find (see own_names of queue_set); null: the only one
--          with this name, in whichever queue
-- The dead letter of a dead one stays. Errors: TB005 several queues have this name; TB003 a planned or pending one at
-- another isolation level than READ COMMITTED.
-- Reads: see _subject_named, _subject_now; writes tombstone; deletes from subject_job.
-- profile: nested
-- rights: operator
create or replace function tallybook.subject_forget(task text, subject text,
  at timestamptz default clock_timestamp(), queue text default null) returns text
language plpgsql
set enable_nestloop = on  -- also where the caller has it off
as $$
declare k record; v_state text;
begin
  for turn in 1..100 loop
    select n.job_id, n.ended_as into k from tallybook._subject_named(task, subject, queue) n;
    if k.job_id is null then return 'unknown'; end if;
    v_state := k.ended_as;
    if v_state is null then select n.state into v_state from tallybook._subject_now(k.job_id, at) n; end if;
    if v_state = 'active' then return 'active'; end if;
    if v_state in ('planned', 'pending') then
      perform tallybook._read_committed('subject_forget needs READ COMMITTED',
        format('An older snapshot does not show whether job %s has started since.', k.job_id));
      -- Who is about to start it waits for this transaction from here on, and then looks for the tombstone.
      continue when not tallybook._subject_waits(k.job_id, task, at);
      perform tallybook.cancel(k.job_id, 'its subject was forgotten', at);
    end if;
    delete from tallybook.subject_job j
     where j.task = subject_forget.task and j.subject = subject_forget.subject and j.job_id = k.job_id;
    if found then return case when v_state is null then 'unknown' else 'forgotten' end; end if;
  end loop;
  raise exception 'subject % cannot be followed: its history has a hole', to_json(subject) using errcode = 'TB002';
end $$;
