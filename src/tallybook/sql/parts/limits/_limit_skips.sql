-- _limit_skips(job, name, at): cancel a job that found all permits of this key taken, if its rule has skips; returns
-- true.
--
-- False: it waits. So does a job that holds a permit itself, whose first answer was lost.
-- Reads limit_rule, concurrency_holder; writes what cancel_running writes.
-- profile: nested
create or replace function tallybook._limit_skips(p_job tallybook._limited_job, p_name text, p_at timestamptz)
returns boolean language plpgsql as $$
begin
  if not exists (select from tallybook._limit_of('concurrency', p_name) r where r.skips)
     or exists (select from tallybook.concurrency_holder h
                 where h.name = p_name and h.xid = p_job.xid and h.seq = p_job.seq) then return false; end if;
  perform tallybook.cancel_running(p_job.lease, p_job.job_id, p_job.attempt,
                                   format('skipped: the permits of the limit %s are taken', to_json(p_name)), p_at);
  return true;
end $$;
