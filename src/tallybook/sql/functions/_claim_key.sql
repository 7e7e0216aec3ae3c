-- _claim_key(task, key, job_id): the job that has this unique key now: the new one, or an older one that is still open.
--
-- Waits only for a producer that is using the same key at the same moment; at REPEATABLE READ such a meeting raises
-- 40001, for the caller's own retry. Reads and writes unique_key.
create or replace function tallybook._claim_key(p_task text, p_key text, p_job_id bigint) returns bigint
language plpgsql as $$
declare
  v_generation bigint; v_holder bigint;
begin
  if octet_length(p_key) not between 1 and 512 then
    raise exception 'a unique key has 1 to 512 bytes, this one has %', octet_length(p_key) using errcode = 'TB005';
  end if;
  loop
    v_generation := 0;
    select u.generation, u.job_id into v_generation, v_holder
      from tallybook.unique_key u where u.task = p_task and u.key = p_key order by u.generation desc limit 1;
    if found and tallybook._job_open(v_holder) then
      if v_holder = p_job_id then return p_job_id; end if;
      if exists (select from tallybook.tombstone t where t.job_id = v_holder and t.cancelled and t.xid = pg_current_xact_id_if_assigned()) then
        raise exception 'job % was cancelled in this transaction and may have started: its unique key is not free yet', v_holder
          using errcode = 'TB005', hint = 'Commit the cancel first, then enqueue.';
      end if;
      return v_holder;
    end if;
    insert into tallybook.unique_key (task, key, generation, job_id)
    values (p_task, p_key, coalesce(v_generation, 0) + 1, p_job_id) on conflict do nothing;
    if found then return p_job_id; end if;
  end loop;
end $$;
