-- retry_dead(...): retry all matching dead letters, oldest first, at most max_jobs. Returns the number of retried ones,
-- and of refused ones: another live job has the unique key or the subject, or a person has just retried or dropped it.
-- The filters are those of dead_letters; before is exclusive. Dead letters are locked in the order in which they died,
-- by retry_jobs in the order of ids: of two such calls for the same jobs one can end with a deadlock (40P01).
-- Errors: TB003. Reads and writes: see retry.
-- rights: operator
create or replace function tallybook.retry_dead(queue text default null, task text default null,
  reason text default null, text text default null, args jsonb default null, since timestamptz default null,
  before timestamptz default null, max_jobs int default 10000, out retried int, out refused int)
language sql as $$
  select count(*) filter (where r.done = 'retried'), count(*) filter (where r.done <> 'retried')
    from tallybook._dead_ids(queue, task, reason, text, args, since, before, max_jobs) i
   cross join lateral tallybook._retry_or_cancel('retry', i) r
$$;
