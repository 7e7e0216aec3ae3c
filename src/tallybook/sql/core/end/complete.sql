-- complete(lease, job_id, attempt, result): end an attempt as completed. Returns false if refused; see complete_many.
-- rights: worker
create or replace function tallybook.complete(lease uuid, job_id bigint, attempt int, result jsonb default null,
  at timestamptz default clock_timestamp()) returns boolean
language sql as $$
  select tallybook.complete_many(array[lease], array[job_id], array[attempt],
                                 case when result is not null then array[result::text] end, at) = '{}'
$$;
