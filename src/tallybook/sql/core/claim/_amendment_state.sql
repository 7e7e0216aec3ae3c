-- _amendment_state(job_id, task, crowd): what whoever is about to start an attempt that has a unique key has to know.
--
-- busy: a producer that relied on this job being queued, or has changed it, is still in its transaction: look again
-- soon; of a producer with very many jobs (crowd), perhaps another job of this task: see _start_waits. Else what it was
-- changed to, read by a newer snapshot than the probe (hence volatile), and whether it was cancelled by then.
create or replace function tallybook._amendment_state(p_job_id bigint, p_task text,
  p_crowd boolean) returns tallybook.amendment_state
language plpgsql
-- profile: lookup
as $$
declare
  k tallybook.amendment_state; v_slot int := 1 + (hashtext(p_task) & 63);
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
