-- _pruned_hint(job_id): the hint for a missing job that its history was deleted: its id was given out by this node, and
-- is below all that are left. Null: nothing is known.
-- profile: lookup
create or replace function tallybook._pruned_hint(p_job_id bigint) returns text language sql stable as $$
  select 'The job is older than all stored jobs: its retention has passed.'
    from pg_catalog.pg_sequence q, tallybook.job_id s
   where q.seqrelid = 'tallybook.job_id'::regclass and p_job_id between q.seqmin and s.last_value
     and exists (select from tallybook.pruned)
     and coalesce(p_job_id < least((select min(e.job_id) from tallybook.entry e where e.job_id >= q.seqmin),
                                   (select min(a.job_id) from tallybook._aside a where a.job_id >= q.seqmin)), true)
$$;
