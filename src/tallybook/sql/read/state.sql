-- state(job_id): return the state of one job as in the view tallybook.job; null: there is no such job, or its history
-- has been deleted.
-- For producers: a caller who knows an id can read its state and nothing else. Reads what the view reads.
-- profile: nojit
-- rights: producer, worker, operator, reader
create or replace function tallybook.state(job_id bigint) returns text
language sql stable as $$ select j.state from tallybook.job j where j.id = state.job_id $$;

-- _enqueued(job_ids, before): count these jobs that were enqueued before then. An app calls it when it has lost the
-- answer to a commit.
-- profile: nojit
-- rights: producer, worker
create or replace function tallybook._enqueued(p_job_ids bigint[], p_before timestamptz) returns bigint
language sql stable
as $$ select count(*) from tallybook.job j where j.id = any (p_job_ids) and j.enqueued_at <= p_before $$;
