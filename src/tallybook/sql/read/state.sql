-- state(job_id): the state of one job, as the view tallybook.job says it; null: there is no such job, or it has left
-- the history.
-- For producers: who knows an id may ask for its state, and for nothing else of it. Reads what the view reads.
-- rights: producer, worker, operator, reader
create or replace function tallybook.state(job_id bigint) returns text
language sql stable
-- profile: nojit
as $$ select j.state from tallybook.job j where j.id = state.job_id $$;

-- _enqueued(job_ids, before): how many of these jobs are there that were put in before then: what an app asks that has
-- lost the answer to a commit.
-- rights: producer, worker
create or replace function tallybook._enqueued(p_job_ids bigint[], p_before timestamptz) returns bigint
language sql stable
-- profile: nojit
as $$ select count(*) from tallybook.job j where j.id = any (p_job_ids) and j.enqueued_at <= p_before $$;
