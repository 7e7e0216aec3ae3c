-- retry_dead(...): retry all matching dead letters, at most max_jobs, those that died first. Returns the number of
-- retried ones, and of refused ones: another live job has the unique key or the subject, or a user has just retried or
-- dropped it.
-- The filters are those of dead_letters; before is exclusive. The jobs are retried in the order of their ids, as by
-- retry_jobs, so two such calls for the same jobs cannot deadlock. Their unique keys are taken in that order, too: with
-- a transaction that enqueues jobs of several of these keys, a deadlock (40P01) can occur.
-- Errors: TB003. Reads and writes: see retry.
-- rights: operator
create or replace function tallybook.retry_dead(queue text default null, task text default null,
  reason text default null, text text default null, args jsonb default null, since timestamptz default null,
  before timestamptz default null, max_jobs int default 10000, out retried int, out refused int)
language sql as $$
  select count(*) filter (where r.done = 'retried'), count(*) filter (where r.done <> 'retried')
    from (select d.job_id from tallybook._dead_oldest(queue, task, reason, text, args, since, before, max_jobs) d
           order by d.job_id offset 0) k(i)
   cross join lateral tallybook._retry_or_cancel('retry', i) r
$$;
