-- _leave_limits(job_ids): remove ended jobs from the lines of permits. Deletes from concurrency_line.
-- profile: nested
create or replace function tallybook._leave_limits(p_ids bigint[]) returns void language sql as $$
  delete from tallybook.concurrency_line n using unnest(p_ids) i(id) where n.job_id = i.id
$$;

-- _raise_in_lines(job_id, priority): give a job that waits for a permit this priority there. The caller has locked its
-- row in waiting, which others lock before that of the line. Writes concurrency_line.
-- profile: lookup
create or replace function tallybook._raise_in_lines(p_job_id bigint, p_priority int) returns void language sql as $$
  update tallybook.concurrency_line n set priority = p_priority where n.job_id = p_job_id
$$;
