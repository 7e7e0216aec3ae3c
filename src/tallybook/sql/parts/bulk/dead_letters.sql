-- dead_letters(...): list the dead letters that match, newest first, at most max_jobs. A null argument matches all.
--   text    the last error's type or message contains this; case does not matter
--   args    the job's args contain this
--   before  died before this time: for the next page pass the last one's died_at, and its job_id as before_id, because
--           many can die at the same time
--   max_looked  how many dead letters to search at most; null: all. If the search stops there, the column why of the
--               last row is null: the next call continues from this row
-- profile: nested
-- rights: operator
create or replace function tallybook.dead_letters(queue text default null, task text default null,
  reason text default null, text text default null, args jsonb default null, since timestamptz default null,
  before timestamptz default null, max_jobs int default 50, before_id bigint default null, max_looked int default null)
returns table (job_id bigint, died_at timestamptz, queue_name text, task_name text, why text, failures int, crashes int,
               attempt int, enqueued_at timestamptz, job_args jsonb, summary text, last_error jsonb)
language plpgsql stable as $$
begin
  before := coalesce(before, 'infinity'); before_id := coalesce(before_id, 0); since := coalesce(since, '-infinity');
  return query
  with found as materialized (
    select (k.d).job_id, (k.d).died_at, l.queue, (k.d).task, (k.d).reason, (k.d).failures::int, (k.d).crashes::int,
           (k.d).attempt, (k.d).enqueued_at, (k.d).args, tallybook.summary((k.d).task, (k.d).args),
           (k.d).errors -> -1 as last_error
      from (select x as d from tallybook.dead x
             where (x.died_at, x.job_id) < (dead_letters.before, dead_letters.before_id)
               and x.died_at >= dead_letters.since
             order by x.died_at desc, x.job_id desc limit dead_letters.max_looked) k
      cross join lateral (select n.queue from tallybook.lane n where n.lane_id = (k.d).lane_id limit 1) l
     where tallybook._dead_matches(k.d, l.queue, dead_letters.queue, dead_letters.task, dead_letters.reason,
                                   dead_letters.text, dead_letters.args, dead_letters.since)
     order by (k.d).died_at desc, (k.d).job_id desc limit dead_letters.max_jobs)
  select f.* from found f
  union all
  select k.job_id, k.died_at, null, null, null, 0, 0, 0, null, null, null, null
    from (select x.job_id, x.died_at from tallybook.dead x
           where (x.died_at, x.job_id) < (dead_letters.before, dead_letters.before_id)
             and x.died_at >= dead_letters.since
             and dead_letters.max_looked is not null and (select count(*) from found) < dead_letters.max_jobs
           order by x.died_at desc, x.job_id desc limit 1 offset dead_letters.max_looked - 1) k;
end $$;

-- _dead_matches(dead letter, its queue, filters): whether it matches, for all three verbs.
create or replace function tallybook._dead_matches(d tallybook.dead, p_of_queue text, p_queue text, p_task text,
  p_reason text, p_text text, p_args jsonb, p_since timestamptz) returns boolean
language sql stable as $$
  select (p_queue is null or p_of_queue = p_queue)
     and (p_task is null or d.task = p_task)
     and (p_reason is null or d.reason = p_reason)
     and (p_text is null or strpos(lower(concat_ws(' ', d.errors -> -1 ->> 'type', d.errors -> -1 ->> 'message')),
                                   lower(p_text)) > 0)
     and (p_args is null or d.args @> p_args)
     and (p_since is null or d.died_at >= p_since)
$$;

-- _dead_oldest(filters): the matching ones, oldest first: these are changed by retry_dead and drop_dead_many.
-- rights: operator
create or replace function tallybook._dead_oldest(p_queue text, p_task text, p_reason text, p_text text, p_args jsonb,
  p_since timestamptz, p_before timestamptz, p_max_jobs int) returns table (job_id bigint, died_at timestamptz,
  queue text, task text, reason text, attempt int, error_type text) language sql stable as $$
  select d.job_id, d.died_at, l.queue, d.task, d.reason, d.attempt, d.errors -> -1 ->> 'type'
    from tallybook.dead d join tallybook.lane l on l.lane_id = d.lane_id
   where tallybook._dead_matches(d, l.queue, p_queue, p_task, p_reason, p_text, p_args, p_since)
     and (p_before is null or d.died_at < p_before) order by d.died_at, d.job_id limit p_max_jobs
$$;
