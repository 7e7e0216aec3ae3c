-- checkpoint(lease, job_id, attempt, value): store where the next attempt of the job continues if this one does not
-- complete. Returns false if the attempt no longer belongs to the caller.
-- One JSON value of at most 1,000,000 bytes; it replaces the previous one. Read it with checkpoint_of.
-- Errors: TB005 a larger value. Reads claim, entry, outcome; writes progress, one row per job.
-- profile: lookup
-- rights: worker
create or replace function tallybook.checkpoint(lease uuid, job_id bigint, attempt int, value jsonb,
  at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  if pg_column_size(value) > 500000 and octet_length(value::text) > 1200000 then
    raise exception 'a checkpoint has % bytes', octet_length(value::text) using errcode = 'TB005',
      hint = 'It can have at most 1,000,000 bytes.';
  end if;
  if not tallybook._running(lease, job_id, attempt) then return false; end if;
  insert into tallybook.progress as p (job_id, attempt, checkpoint, updated_at)
  values (checkpoint.job_id, checkpoint.attempt, checkpoint.value, checkpoint.at)
  on conflict on constraint progress_pkey do update
    set attempt = excluded.attempt, checkpoint = excluded.checkpoint, updated_at = excluded.updated_at
    where p.attempt <= excluded.attempt;
  return true;
end $$;
