-- _last_start(job_id, attempt): when the newest attempt up to this one started; null if none did or its history has
-- been dropped. Attempts that were set aside before their start do not count.
-- profile: hot
-- rights: operator, reader
create or replace function tallybook._last_start(p_job_id bigint, p_attempt int) returns timestamptz
language plpgsql stable
set enable_sort = off  -- the index has them in order: a sort would read all
as $$
begin
  return coalesce(
    (select c.claimed_at from tallybook.entry e, lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c
      where e.job_id = p_job_id and e.attempt > 1 and e.attempt <= p_attempt and c.worker_id is not null
        and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq) o where o.state = 'moved')
      order by e.attempt desc limit 1),
    (select c.claimed_at from tallybook.entry e, lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c
      where e.job_id = p_job_id and e.attempt = 1 and c.worker_id is not null
        and not exists (select from tallybook._outcome_of(e.retention, e.xid, e.seq) o where o.state = 'moved')
      limit 1));
end $$;

-- _last_end(job_id): when the newest attempt of a job ended; null if it has not or its history has been dropped.
-- rights: operator, reader
create or replace function tallybook._last_end(p_job_id bigint) returns timestamptz
language plpgsql stable as $$
declare e tallybook.entry := tallybook._newest_entry(p_job_id);
begin
  return (select o.ended_at from tallybook._outcome_of(e.retention, e.xid, e.seq) o);
end $$;
