-- _put(...): appends one new job under an id that is given, where _place says. What enqueue does after its checks.
create or replace function tallybook._put(p_job_id bigint, p_queue text, p_task text, p_args jsonb,
  p_run_at timestamptz, p_priority int, p_unique_key text, p_max_attempts int, p_headers jsonb, p_now timestamptz,
  p_order_key text default null, p_expires_at timestamptz default null, p_options jsonb default null) returns void
language plpgsql as $$
declare
  v_lane int; v_retention "char";
begin
  select l.lane_id, l.retention into v_lane, v_retention
    from tallybook.lane l
   where l.queue = p_queue and l.priority = p_priority and l.part = '' and l.retired_at is null
   order by l.lane_id desc limit 1;
  if not found then
    select l.lane_id, l.retention into v_lane, v_retention from tallybook._lane(p_queue, p_priority, '') l;
  end if;
  perform tallybook._place(
    row(null, p_job_id, p_job_id, p_now, v_lane, 1, 0, 0, p_max_attempts, v_retention, p_task, p_args, p_headers,
        p_unique_key, null, null, p_expires_at, p_order_key, p_options)::tallybook.entry,
    p_run_at, p_now, p_queue, true);
end $$;
