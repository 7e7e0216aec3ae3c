-- _forget_tombstones(at): delete the tombstones of jobs that have ended. Called by rescue.
-- Never waits: a user's open transaction may hold one.
create or replace function tallybook._forget_tombstones(p_at timestamptz) returns void
language plpgsql as $$
begin
  if not exists (select from tallybook.tombstone) then return; end if;
  delete from tallybook.tombstone t using (
    select k.job_id, k.attempt from tallybook.tombstone k
     where k.created_at < p_at - interval '1 min'
       and not exists (select from tallybook.scheduled s where s.job_id = k.job_id)
       and not exists (select from tallybook.waiting s where s.job_id = k.job_id)
       and not exists (select from tallybook.entry x where x.job_id = k.job_id
                          and (not exists (select from tallybook.outcome o
                                            where o.retention = x.retention and o.entry_xid = x.xid
                                                  and o.entry_seq = x.seq)
                               or k.taken and x.attempt = k.attempt and not tallybook._cursor_passed(x.lane_id,
                                   x.retention, x.xid, x.seq)))
     limit 1000 for update skip locked) k
   where t.job_id = k.job_id and t.attempt = k.attempt;
end $$;
