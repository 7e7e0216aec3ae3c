-- progress(lease, job_id, attempt, done, message): store the progress of a running attempt for the view job. Returns
-- false if the attempt no longer belongs to the caller.
--   done     from 0 to 1; null: unknown
--   message  one line for people, cut off after 1,000 characters
-- Errors: TB005. Reads claim, entry, outcome; writes progress, one row per job.
-- profile: lookup
-- rights: worker
create or replace function tallybook.progress(lease uuid, job_id bigint, attempt int, done real default null,
  message text default null, at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  perform tallybook._check_range('done', done::text, coalesce(done between 0 and 1, true), 'It must be from 0 to 1.');
  if not tallybook._running(lease, job_id, attempt) then return false; end if;
  insert into tallybook.progress as p (job_id, attempt, done, message, updated_at)
  values (progress.job_id, progress.attempt, progress.done, left(progress.message, 1000), progress.at)
  on conflict on constraint progress_pkey do update
    set attempt = excluded.attempt, done = excluded.done, message = excluded.message, updated_at = excluded.updated_at
    where p.attempt <= excluded.attempt;
  return true;
end $$;
