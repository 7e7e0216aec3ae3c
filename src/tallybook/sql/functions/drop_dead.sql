-- drop_dead(job_id): throw a dead letter away. False: there is none. What is left of the job is its history.
create or replace function tallybook.drop_dead(job_id bigint) returns boolean
language plpgsql as $$
begin
  delete from tallybook.dead d where d.job_id = drop_dead.job_id;
  return found;
end $$;

-- dead_letters(...): the dead letters that match, newest first, at most max_jobs. A null argument matches all.
--   text    is contained in the last error's type or message, whatever the case
--   args    is contained in the job's args
--   before  died before: pass the last one's died_at to read on
create or replace function tallybook.dead_letters(queue text default null, task text default null, reason text default null,
  text text default null, args jsonb default null, since timestamptz default null, before timestamptz default null, max_jobs int default 50)
returns table (job_id bigint, died_at timestamptz, queue_name text, task_name text, why text, failures int, crashes int,
               attempt int, enqueued_at timestamptz, job_args jsonb, summary text, last_error jsonb)
language plpgsql stable as $$
#variable_conflict use_column
begin
  return query
  select d.job_id, d.died_at, l.queue, d.task, d.reason, d.failures::int, d.crashes::int, d.attempt, d.enqueued_at, d.args,
         tallybook.summary(d.task, d.args), d.errors -> -1
    from tallybook.dead d join tallybook.lane l on l.lane_id = d.lane_id
   where (dead_letters.queue is null or l.queue = dead_letters.queue)
     and (dead_letters.task is null or d.task = dead_letters.task)
     and (dead_letters.reason is null or d.reason = dead_letters.reason)
     and (dead_letters.text is null or strpos(lower(concat_ws(' ', d.errors -> -1 ->> 'type', d.errors -> -1 ->> 'message')), lower(dead_letters.text)) > 0)
     and (dead_letters.args is null or d.args @> dead_letters.args)
     and (dead_letters.since is null or d.died_at >= dead_letters.since)
     and (dead_letters.before is null or d.died_at < dead_letters.before)
   order by d.died_at desc, d.job_id desc limit dead_letters.max_jobs;
end $$;

-- retry_dead(...): give every dead letter that matches another attempt, oldest first, at most max_jobs. Returns how many, and
-- how many not: another live job has their unique key. The filters are those of dead_letters.
create or replace function tallybook.retry_dead(queue text default null, task text default null, reason text default null,
  text text default null, args jsonb default null, since timestamptz default null, before timestamptz default null,
  max_jobs int default 10000, out retried int, out refused int)
language plpgsql as $$
declare
  v_id bigint;
begin
  retried := 0; refused := 0;
  for v_id in select f.job_id from (select d.job_id, d.died_at from tallybook.dead_letters(retry_dead.queue, retry_dead.task,
                retry_dead.reason, retry_dead.text, retry_dead.args, retry_dead.since, retry_dead.before, null) d) f
               order by f.died_at, f.job_id limit retry_dead.max_jobs loop
    begin
      perform tallybook.retry(v_id);
      retried := retried + 1;
    exception when sqlstate 'TB005' or sqlstate 'TB002' then
      refused := refused + 1;
    end;
  end loop;
end $$;

-- drop_dead_many(...): throw away every dead letter that matches, oldest first, at most max_jobs. Returns how many.
create or replace function tallybook.drop_dead_many(queue text default null, task text default null, reason text default null,
  text text default null, args jsonb default null, since timestamptz default null, before timestamptz default null, max_jobs int default 10000)
returns int language plpgsql as $$
declare
  v_n int;
begin
  delete from tallybook.dead d using (
    select f.job_id from (select x.job_id, x.died_at from tallybook.dead_letters(drop_dead_many.queue, drop_dead_many.task,
             drop_dead_many.reason, drop_dead_many.text, drop_dead_many.args, drop_dead_many.since, drop_dead_many.before, null) x) f
     order by f.died_at, f.job_id limit drop_dead_many.max_jobs) k
   where d.job_id = k.job_id;
  get diagnostics v_n = row_count;
  return v_n;
end $$;
