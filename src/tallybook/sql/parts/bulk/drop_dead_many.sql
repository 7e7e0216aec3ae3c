-- drop_dead_many(...): delete all matching dead letters, oldest first, at most max_jobs. Returns their number.
-- rights: operator
create or replace function tallybook.drop_dead_many(queue text default null, task text default null,
  reason text default null, text text default null, args jsonb default null, since timestamptz default null,
  before timestamptz default null, max_jobs int default 10000)
returns int language sql as $$
  with gone as (
    delete from tallybook.dead d
     using tallybook._dead_oldest(drop_dead_many.queue, drop_dead_many.task, drop_dead_many.reason, drop_dead_many.text,
             drop_dead_many.args, drop_dead_many.since, drop_dead_many.before, drop_dead_many.max_jobs) k
     where d.job_id = k.job_id returning 1)
  select count(*)::int from gone
$$;
