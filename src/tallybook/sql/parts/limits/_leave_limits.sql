-- _leave_limits(job_ids): remove ended jobs from the lines of permits. Deletes from concurrency_line.
-- profile: nested
create or replace function tallybook._leave_limits(p_ids bigint[]) returns void language sql as $$
  delete from tallybook.concurrency_line n using unnest(p_ids) i(id) where n.job_id = i.id
$$;
