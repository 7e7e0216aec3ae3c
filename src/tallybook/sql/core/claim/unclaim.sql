-- unclaim(lease, job_id, attempt, delay): give back a claimed job that has not started, at once or after a delay.
--
-- Counts no failure. The attempt ends as moved and is not shown as one of the job's attempts.
-- Returns scheduled, available (without a delay), or refused. Errors: TB005 an infinite delay. Reads claim, entry;
-- writes outcome, and scheduled or entry.
-- rights: worker
create or replace function tallybook.unclaim(lease uuid, job_id bigint, attempt int, delay interval default '0',
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare e tallybook.entry;
begin
  perform tallybook._refuse(not isfinite(delay), 'delay is ' || delay, 'Give an interval that ends.');
  e := tallybook._end(lease, job_id, attempt, 'moved', null, unclaim.at);
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._next_attempt(e, at + delay, at);
  return case when delay > interval '0' then 'scheduled' else 'available' end;
end $$;
