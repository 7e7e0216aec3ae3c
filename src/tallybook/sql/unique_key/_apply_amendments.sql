-- _apply_amendments(at): move the jobs in line that a conflict of unique keys gave another priority or time.
--
-- Each leaves its line as in claim_job: a tombstone, then its lane's lock, which is only tried. A job claimed meanwhile
-- keeps its priority for this attempt; claimed_jobs applies its time. A job that was rescheduled meanwhile is changed
-- where it is.
-- Unordered, so jobs that cannot move now do not delay others. The tombstone may have to wait for a user's transaction
-- that has cancelled the job; meanwhile nothing else is moved, because lanes are locked already.
-- profile: lookup
create or replace function tallybook._apply_amendments(p_at timestamptz) returns void
language plpgsql
set lock_timeout = '20ms'  -- another open transaction may cancel the same job
as $$
declare a tallybook.amendment; e tallybook.entry;
begin
  for a in select x.* from tallybook.amendment x
            where x.priority is not null or x.run_at is not null order by random() limit 200 for update skip locked loop
    select x.* into e from tallybook.entry x where x.job_id = a.job_id order by x.attempt desc limit 1;
    if not found or exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq)) then
      perform from tallybook.scheduled s where s.job_id = a.job_id for update skip locked;
      if found then
        perform tallybook._amend_aside(a.job_id, a.args, a.priority, a.run_at, a.version, p_at);
        delete from tallybook.amendment x where x.job_id = a.job_id;
      end if;
      continue;
    end if;
    continue when tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
               or exists (select from tallybook.tombstone t where t.job_id = a.job_id
                          and (t.cancelled or t.attempt = e.attempt));
    if a.priority is null and a.run_at <= p_at then  -- its time came while it was in line
      update tallybook.amendment x set run_at = null where x.job_id = a.job_id;
      continue;
    end if;
    begin
      insert into tallybook.tombstone (job_id, attempt, taken, created_at)
        values (a.job_id, e.attempt, true, p_at) on conflict do nothing;
      continue when not found;
    exception when lock_not_available then
      return;
    end;
    if not pg_try_advisory_xact_lock(1413565441, e.lane_id)
       or tallybook._cursor_passed(e.lane_id, e.retention, e.xid, e.seq)
       or exists (select from tallybook.tombstone t where t.job_id = a.job_id and t.cancelled)
       or exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq)) then
      delete from tallybook.tombstone t where t.job_id = a.job_id and t.attempt = e.attempt and t.taken
        and not t.cancelled;
      continue;
    end if;
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state)
    values (e.xid, e.seq, e.job_id, p_at, e.retention, 'moved');
    perform tallybook._tally(array[e.lane_id], array[e.task], array['moved'], array[1], array[e.attempt]);
    e := tallybook._amended(e, p_at);
    perform tallybook._moved_to(e, a.run_at, p_at);
  end loop;
end $$;
