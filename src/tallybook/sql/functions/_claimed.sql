-- _claimed(lease): when a claim was made, and the name of the worker that made it: the beginning of its attempts.
create or replace function tallybook._claimed(p_lease uuid, out claimed_at timestamptz, out worker text)
language plpgsql stable
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
begin
  select c.claimed_at, w.name into claimed_at, worker
    from tallybook.claim c left join tallybook.worker w on w.id = c.worker_id where c.lease = p_lease limit 1;
end $$;
