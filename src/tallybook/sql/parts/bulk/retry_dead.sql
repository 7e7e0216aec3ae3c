-- retry_dead(...): retry all matching dead letters, oldest first, at most max_jobs. Returns the number of retried ones,
-- and of those whose unique key another live job has. The filters are those of dead_letters.
-- rights: operator
create or replace function tallybook.retry_dead(queue text default null, task text default null,
  reason text default null, text text default null, args jsonb default null, since timestamptz default null,
  before timestamptz default null, max_jobs int default 10000, out retried int, out refused int)
language sql as $$
  select count(*) filter (where r.done = 'retried'), count(*) filter (where r.done <> 'retried')
    from tallybook._dead_ids(queue, task, reason, text, args, since, before, max_jobs) i
   cross join lateral tallybook._retry_or_cancel('retry', i) r
$$;
