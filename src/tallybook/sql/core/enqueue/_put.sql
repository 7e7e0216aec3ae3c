-- _put(...): appends one job, to its lane or to scheduled, under an id that is given. What enqueue does after its checks.
create or replace function tallybook._put(p_job_id bigint, p_queue text, p_task text, p_args jsonb, p_run_at timestamptz,
  p_priority int, p_unique_key text, p_max_attempts int, p_headers jsonb, p_now timestamptz,
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
  if p_run_at > p_now then
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, expires_at, order_key, options)
    values (p_job_id, p_run_at, p_now, v_lane, 1, 0, 0, p_max_attempts, p_task, p_args, p_headers, p_unique_key,
            p_expires_at, p_order_key, p_options);
    if p_run_at < p_now + interval '10 s' then perform tallybook._wake(' promote'); end if;
  elsif p_options ? 'fair_key' then
    insert into tallybook.waiting (job_id, waits_since, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, task, args, headers,
                                   unique_key, expires_at, options, fair_key, fair_seq)
    values (p_job_id, p_now, p_now, tallybook._lane_beside(v_lane, 'fair'), 1, 0, 0, p_max_attempts, p_task, p_args, p_headers,
            p_unique_key, p_expires_at, p_options, p_options ->> 'fair_key', p_job_id);
    perform tallybook._wake(' fair_release');
  else
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, expires_at, order_key, options)
    values (p_job_id, p_job_id, p_now, v_lane, 1, v_retention, 0, 0, p_max_attempts, p_task, p_args, p_headers, p_unique_key,
            p_expires_at, p_order_key, p_options);
    if p_order_key is not null then
      insert into tallybook.order_line (key, seq, job_id) values (p_order_key, p_job_id, p_job_id);
    end if;
    perform tallybook._wake(p_queue);
  end if;
end $$;
