-- complete_many(leases, job_ids, attempts): end many attempts as completed. Returns the job ids that were refused.
--
-- Refused: the lease is not on record, or the attempt has ended otherwise (rescued, cancelled). Nothing else happens then.
-- Said twice by the same lease it is accepted twice, so a caller that lost the answer asks again.
-- Rows go by job id, attempt, like in every verb that ends several, so that no two can deadlock. The plain INSERT comes
-- first: ON CONFLICT would write a second WAL record a row, for a conflict that almost never is.
-- Reads claim, entry; writes outcome.
create or replace function tallybook.complete_many(leases uuid[], job_ids bigint[], attempts int[]) returns bigint[]
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := clock_timestamp(); v_ended bigint[]; v_n bigint;
begin
  begin
    insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
    select h.xid, h.seq, v_now, h.retention, 'completed'
      from tallybook._held(leases, job_ids, attempts) h order by h.job_id, h.attempt;
    get diagnostics v_n = row_count;
    if v_n = cardinality(job_ids) then return '{}'; end if;
    v_ended := array(select h.job_id from tallybook._held(leases, job_ids, attempts) h);
  exception when unique_violation then
    insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
      select h.xid, h.seq, v_now, h.retention, 'completed'
        from tallybook._held(leases, job_ids, attempts) h order by h.job_id, h.attempt
      on conflict do nothing;
    v_ended := array(
      select h.job_id from tallybook._held(leases, job_ids, attempts) h
        join tallybook.outcome o on o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq
       where o.state = 'completed');
  end;
  return array(select j from unnest(job_ids) j where j <> all (coalesce(v_ended, '{}')));
end $$;
