-- subject_append(queue, task, args, ...): create a subject with a random name (a UUID), which is pending at once,
-- behind the others.
-- rights: producer
create or replace function tallybook.subject_append(queue text, task text, args jsonb default '{}',
  priority int default 2, max_attempts int default null, headers jsonb default null, options jsonb default null,
  at timestamptz default clock_timestamp(), out job_id bigint, out subject text)
language sql as $$
  select p.job_id, n.subject from (select gen_random_uuid()::text as subject) n,
         lateral tallybook.subject_push(queue, task, n.subject, args, null, priority, max_attempts, headers, options,
                                        at) p
$$;
