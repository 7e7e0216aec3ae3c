-- _claimed(lease): when a claim was made and the name of its worker, which is how its attempts begin.
-- profile: nested
create or replace function tallybook._claimed(p_lease uuid, out claimed_at timestamptz, out worker text)
language plpgsql stable as $$
begin
  -- No join: one that was planned while the tables were empty may begin with all claims.
  select c.claimed_at, (select w.name from tallybook.worker w where w.id = c.worker_id) into claimed_at, worker
    from tallybook.claim c where c.lease = p_lease limit 1;
end $$;
