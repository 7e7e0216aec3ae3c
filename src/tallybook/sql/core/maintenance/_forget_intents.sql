-- _forget_intents(at): delete the amendments and tombstones of jobs that have ended. Called by rescue.
create or replace function tallybook._forget_intents(p_at timestamptz) returns void
language plpgsql as $$
begin
  -- Amendments of jobs that have ended; a cancelled one may be retried, with what it was changed to.
  if exists (select from tallybook.amendment) then
    delete from tallybook.amendment a using (
      select k.job_id from tallybook.amendment k
       where not tallybook._job_open(k.job_id)
         and (select x.job_id from tallybook.entry x left join tallybook.outcome o
                on o.retention = x.retention and o.entry_xid = x.xid and o.entry_seq = x.seq
               where x.job_id = k.job_id and coalesce(o.state, 'cancelled') = 'cancelled' limit 1) is null
         and not exists (select from tallybook.scheduled s where s.job_id = k.job_id)
         and not exists (select from tallybook.waiting s where s.job_id = k.job_id)
       limit 1000 for update skip locked) k
     where a.job_id = k.job_id;
  end if;
  -- Tombstones of jobs that have ended. Never waits: a user's open transaction may hold one.
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
