-- _amendment_state(job_id, task, crowd): what a claimer must know before it starts a job that has a unique key.
--
-- busy  a producer's open transaction has changed the job, or relies on it being queued: check again soon. For a
-- producer with very many jobs (crowd) it may be another job of this task, see _start_waits.
-- Otherwise returns the job's new values, read by a newer snapshot than the probe (hence volatile), and whether it had
-- been cancelled by then.
-- profile: lookup
create or replace function tallybook._amendment_state(p_job_id bigint, p_task text,
  p_crowd boolean) returns tallybook.amendment_state language plpgsql as $$
declare k tallybook.amendment_state; v_slot int := 1 + (hashtext(p_task) & 63);
begin
  k.busy := not (pg_try_advisory_lock(1413565447, hashint8(p_job_id))
                 and pg_advisory_unlock(1413565447, hashint8(p_job_id)))
         or p_crowd and not (pg_try_advisory_lock(1413565446, v_slot) and pg_advisory_unlock(1413565446, v_slot));
  if not k.busy then
    select a.args, a.run_at, a.version into k.args, k.run_at, k.version from tallybook.amendment a
           where a.job_id = p_job_id;
    k.cancelled := exists (select from tallybook.tombstone t where t.job_id = p_job_id and t.cancelled and not t.once);
  end if;
  return k;
end $$;
