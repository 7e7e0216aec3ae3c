-- _cancel_child(child, at): end a job in waiting as cancelled, since a parent of it did not complete. False: somebody's open
-- transaction cancels it, too. The caller has locked its row.
--
-- It never was in line: its entry comes with its outcome, and a tombstone takes the cursor past it. A person may retry it.
create or replace function tallybook._cancel_child(p_child bigint, p_at timestamptz) returns boolean
language plpgsql
set lock_timeout = '20ms' set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  w tallybook.waiting; v_retention "char"; v_seq bigint := nextval('tallybook.job_id'); v_reason text; v_options jsonb;
begin
  select x.* into strict w from tallybook.waiting x where x.job_id = p_child;
  begin
    insert into tallybook.tombstone as t (job_id, attempt, taken, created_at) values (w.job_id, w.attempt, true, p_at)
    on conflict on constraint tombstone_pkey do update set taken = true;
  exception when lock_not_available then
    return false;
  end;
  -- A person's word comes first.
  select t.reason into v_reason from tallybook.tombstone t where t.job_id = w.job_id and t.cancelled and not t.once limit 1;
  select coalesce(v_reason, format('its parent %s (%s) is %s%s', p.failure ->> 'job', coalesce(p.failure ->> 'task', 'unknown'), p.failure ->> 'state',
                                   coalesce(': ' || coalesce(p.failure ->> 'message', p.failure ->> 'reason'), '')))
    into v_reason from tallybook.parent p where p.child_id = w.job_id and p.failure is not null order by p.place limit 1;
  select w.options || jsonb_build_object('parents', jsonb_build_object('ended', count(p.ended_as), 'failed', count(p.failure)))
    into v_options from tallybook.parent p where p.child_id = w.job_id;
  delete from tallybook.waiting x where x.job_id = w.job_id;
  delete from tallybook.parent p where p.child_id = w.job_id;
  select l.retention into v_retention from tallybook.lane l where l.lane_id = w.lane_id;
  insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts, task, args, headers,
                               unique_key, run_at, errors, expires_at, order_key, options)
  values (v_seq, w.job_id, w.enqueued_at, w.lane_id, w.attempt, v_retention, w.failures, w.crashes, w.max_attempts, w.task, w.args, w.headers,
          w.unique_key, w.run_at, w.errors, w.expires_at, w.options #>> '{parents,order_key}', v_options);
  insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
  values (pg_current_xact_id(), v_seq, w.job_id, p_at, v_retention, 'cancelled', jsonb_build_object('message', v_reason));
  perform tallybook._tally(array[w.lane_id], array[w.task], array['cancelled'], array[1], array[w.attempt]);
  return true;
end $$;
