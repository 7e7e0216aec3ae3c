-- snooze(lease, job_id, attempt, delay): end one attempt and run the job again after a delay; no failure is counted.
--
-- With a delay of 0, the job is available at once. A worker that stops does this with the jobs that it could not
-- finish.
-- Returns scheduled, available, or refused. Errors: TB005 an infinite delay.
-- Reads claim, entry; writes outcome, tally, and scheduled, entry or waiting (with a fair key).
-- rights: worker
create or replace function tallybook.snooze(lease uuid, job_id bigint, attempt int, delay interval,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare e tallybook.entry;
begin
  perform tallybook._refuse(not isfinite(delay), 'delay is ' || delay, 'Give an interval that ends.');
  e := tallybook._end(lease, job_id, attempt, 'snoozed', null, snooze.at);
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._next_attempt(e, at + delay, at, true);
  return case when delay > interval '0' then 'scheduled' else 'available' end;
end $$;
