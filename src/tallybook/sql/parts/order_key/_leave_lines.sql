-- _leave_lines(job_ids, order_keys, at): these jobs have ended, or were rescheduled, before their turn; jobs behind
-- them continue. Waits for nothing, because it may run under a lane's lock. 200 keys per call, because their locks are
-- kept until the commit.
-- profile: nested
create or replace function tallybook._leave_lines(p_job_ids bigint[], p_keys text[], p_at timestamptz) returns void
language plpgsql as $$
begin
  with free as materialized (
    select n.key, n.seq from unnest(p_job_ids) j(id), lateral (
             select o.key, o.seq from tallybook.order_line o where o.job_id = j.id for update skip locked) n)
  delete from tallybook.order_line n using free f where n.key = f.key and n.seq = f.seq;
  perform tallybook._release(k.key, null, p_at) from (
    select u.key from unnest(p_keys) u(key)
     where exists (select from tallybook.waiting w where w.order_key = u.key) order by hashtext(u.key), u.key
           limit 200) k;
end $$;
