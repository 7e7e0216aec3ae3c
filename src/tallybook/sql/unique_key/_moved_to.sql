-- _moved_to(entry, run_at, at): place the next attempt of a job whose attempt was put off.
-- profile: lookup
create or replace function tallybook._moved_to(e tallybook.entry, p_run_at timestamptz, p_at timestamptz) returns void
language plpgsql as $$
begin
  delete from tallybook.amendment a
   where a.job_id = (select x.job_id from tallybook.amendment x
                      where x.job_id = e.job_id and x.args is null and x.priority is null and x.run_at is not distinct
                            from p_run_at
                        for update skip locked);
  perform tallybook._next_attempt(e, p_run_at, p_at);
  if p_run_at > p_at and e.order_key is not null then  -- it lines up again when it is due
    perform tallybook._leave_lines(array[e.job_id], array[e.order_key], p_at);
  end if;
end $$;
