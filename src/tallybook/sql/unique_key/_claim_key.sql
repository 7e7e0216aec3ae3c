-- _claim_key(task, key, job_id, unique_while, on_conflict, ..., at): the job that has this unique key now: the new job,
-- or an older one that is still open, after on_conflict has been applied to it.
--
-- Waits only for a producer that is using the same key at the same moment, and for a pick that may have taken a job
-- before it was cancelled. At REPEATABLE READ a meeting of producers raises 40001, and the caller retries.
-- Errors: TB005 an invalid key, on_conflict or unique_while, or the holder was cancelled in this transaction; TB008 the
-- key is taken and on_conflict is raise. Reads and writes unique_key; see _amend for the writes of on_conflict.
-- profile: lookup
create or replace function tallybook._claim_key(p_task text, p_key text, p_job_id bigint,
  p_while text default 'running', p_on_conflict text default 'skip', p_args jsonb default null,
  p_priority int default null, p_run_at timestamptz default null, p_version jsonb default null,
  p_at timestamptz default clock_timestamp())
returns bigint language plpgsql as $$
declare k tallybook.unique_key; v_holder bigint; v_others bigint[]; j bigint;
begin
  perform tallybook._refuse(octet_length(p_key) not between 1 and 512,
                            format('a unique key has 1 to 512 bytes, this one has %s', octet_length(p_key))),
          tallybook._refuse((p_on_conflict in ('skip', 'raise', 'replace_args', 'raise_priority', 'push_run_at'))
                            is not true, 'on_conflict ' || coalesce(to_json(p_on_conflict)::text, 'null')
                            || ' is unknown', 'It is one of skip, raise, replace_args, raise_priority, push_run_at.'),
          tallybook._refuse((p_while in ('running', 'queued')) is not true,
                            format('unique_while %s is unknown', coalesce(to_json(p_while)::text, 'null')),
                            'It is running (queued or running), or queued.'),
          tallybook._refuse(p_priority not between 0 and 32767, format('priority %s is out of range', p_priority),
                            'It must be from 0 to 32767.'),
          tallybook._refuse(p_on_conflict = 'push_run_at' and p_run_at is null, 'push_run_at needs a run_at',
                            'Give the time to which the job is pushed.');
  loop
    k := null; v_holder := null; v_others := null;
    select u.* into k from tallybook.unique_key u where u.task = p_task and u.key = p_key order by u.generation desc
           limit 1;
    if found then
      foreach j in array k.job_id || coalesce(k.others, '{}') loop
        if not tallybook._job_open(j) then
          continue when not tallybook._pick_waited(j);
          continue when not tallybook._job_open(j);  -- in a newer snapshot
        end if;
        if j = p_job_id then return j; end if;
        if exists (select from tallybook.tombstone t where t.job_id = j and t.cancelled
                   and t.xid = pg_current_xact_id_if_assigned()) then
          raise exception
            'job % was cancelled in this transaction and may have started: its unique key is not free yet', j
            using errcode = 'TB005', hint = 'Commit the cancel first, then enqueue.';
        end if;
        if p_while = 'running' or tallybook._queued_still(j, p_task) then v_holder := j; exit; end if;
        v_others := v_others || j;
      end loop;
    end if;
    if v_holder is not null then
      if p_on_conflict = 'raise' then
        raise exception 'job % has the unique key % of task %', v_holder, to_json(p_key), to_json(p_task)
          using errcode = 'TB008', detail = v_holder::text,
                hint = 'To continue in this transaction, roll back to a savepoint, or use another on_conflict.';
      end if;
      if p_on_conflict = 'skip' or tallybook._amend(v_holder, p_task, p_on_conflict, p_args, p_priority, p_run_at,
                                                           p_while = 'queued', p_version, p_at) then
        return v_holder;
      end if;
      continue;  -- it has started, or ended, between the two looks
    end if;
    insert into tallybook.unique_key (task, key, generation, job_id, others)
    values (p_task, p_key, coalesce(k.generation, 0) + 1, p_job_id, v_others) on conflict do nothing;
    if found then
      -- By an old snapshot the newest generation may be one that has gone since, and the next one free for that: this
      -- raises 40001 then.
      if k.generation is not null and current_setting('transaction_isolation') <> 'read committed' then
        perform from tallybook.unique_key u where u.task = p_task and u.key = p_key
                and u.generation = k.generation for key share;
      end if;
      return p_job_id;
    end if;
  end loop;
end $$;

-- _queued_still(job_id, task): whether a job has not started and will not before the caller's transaction has ended.
--
-- The start waits for the caller (see _start_waits), so the job sees what the caller's transaction writes. The lock
-- comes before the check that counts. With an older snapshot that check proves nothing; such a caller gets a job of its
-- own.
create or replace function tallybook._queued_still(p_job_id bigint, p_task text) returns boolean
language plpgsql as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then return false; end if;
  if not tallybook._job_queued(p_job_id) then return false; end if;  -- do not hold up what runs
  perform tallybook._start_waits(p_job_id, p_task);
  return tallybook._job_queued(p_job_id);
end $$;
