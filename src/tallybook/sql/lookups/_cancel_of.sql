-- _cancel_of(job_id, attempt): the cancel that is pending for this attempt; no row if there is none.
--
-- Like _outcome_of it is inlined into the calling statement and looks up one attempt at a time.
create or replace function tallybook._cancel_of(p_job_id bigint, p_attempt int) returns setof tallybook.tombstone
language sql stable as $$
  select t.* from tallybook.tombstone t
   where t.job_id = p_job_id and t.cancelled and (t.attempt = p_attempt or t.attempt < p_attempt and not t.once)
   order by t.attempt desc limit 1
$$;
