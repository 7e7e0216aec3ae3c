-- progress(lease, job_id, attempt, done, message): how far a running attempt says that it is, for the view. False: refused,
-- the attempt is not the caller's any more.
--   done  from 0 to 1, null: unknown;  message  a line for people, cut at 1,000 characters
-- Errors: TB005. Reads claim, entry, outcome; writes progress, one row a job.
create or replace function tallybook.progress(lease uuid, job_id bigint, attempt int, done real default null, message text default null,
  at timestamptz default clock_timestamp())
returns boolean language plpgsql
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if done not between 0 and 1 then
    raise exception 'done % is out of range', done using errcode = 'TB005', hint = 'It goes from 0 to 1.';
  end if;
  if not tallybook._running(lease, job_id, attempt) then return false; end if;
  insert into tallybook.progress as p (job_id, attempt, done, message, updated_at)
  values (progress.job_id, progress.attempt, progress.done, left(progress.message, 1000), progress.at)
  on conflict on constraint progress_pkey do update
    set attempt = excluded.attempt, done = excluded.done, message = excluded.message, updated_at = excluded.updated_at
    where p.attempt <= excluded.attempt;
  return true;
end $$;

-- checkpoint(lease, job_id, attempt, value): where the job's next attempt can go on, should this one not complete. False: refused.
-- One JSON value of at most 1,000,000 bytes; the last one said counts. Read it with checkpoint_of.
create or replace function tallybook.checkpoint(lease uuid, job_id bigint, attempt int, value jsonb,
  at timestamptz default clock_timestamp())
returns boolean language plpgsql
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  if pg_column_size(value) > 500000 and octet_length(value::text) > 1200000 then
    raise exception 'a checkpoint has % bytes', octet_length(value::text) using errcode = 'TB005', hint = 'At most 1,000,000 bytes fit.';
  end if;
  if not tallybook._running(lease, job_id, attempt) then return false; end if;
  insert into tallybook.progress as p (job_id, attempt, checkpoint, updated_at)
  values (checkpoint.job_id, checkpoint.attempt, checkpoint.value, checkpoint.at)
  on conflict on constraint progress_pkey do update
    set attempt = excluded.attempt, checkpoint = excluded.checkpoint, updated_at = excluded.updated_at
    where p.attempt <= excluded.attempt;
  return true;
end $$;

-- checkpoint_of(job_id): the last checkpoint of any of its attempts; null: none.
create or replace function tallybook.checkpoint_of(job_id bigint) returns jsonb
language sql stable
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
  select p.checkpoint from tallybook.progress p where p.job_id = checkpoint_of.job_id
$$;

-- _running(lease, job_id, attempt): whether this attempt is the lease's and has not ended.
create or replace function tallybook._running(p_lease uuid, p_job_id bigint, p_attempt int) returns boolean
language plpgsql
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
begin
  return exists (select from tallybook._held(array[p_lease], array[p_job_id], array[p_attempt]) h
                  where not exists (select from tallybook.outcome o
                                     where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq));
end $$;
