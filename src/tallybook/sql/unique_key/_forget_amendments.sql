-- _forget_amendments(): delete the amendments of jobs that have ended. Called by rescue.
-- A cancelled job keeps its amendment, because it may be retried with what it was changed to.
create or replace function tallybook._forget_amendments() returns void
language plpgsql as $$
begin
  if not exists (select from tallybook.amendment) then return; end if;
  delete from tallybook.amendment a using (
    select k.job_id from tallybook.amendment k
     where not tallybook._job_open(k.job_id)
       and (select x.job_id from tallybook.entry x left join lateral tallybook._outcome_of(x.retention, x.xid, x.seq) o
              on true where x.job_id = k.job_id and coalesce(o.state, 'cancelled') = 'cancelled' limit 1) is null
       and not exists (select from tallybook._aside a where a.job_id = k.job_id and a.place <> 'dead')
     limit 1000 for update skip locked) k
   where a.job_id = k.job_id;
end $$;
