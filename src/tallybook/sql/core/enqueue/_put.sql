-- _put(...): append a new job under a given id, where _place decides. The part of enqueue behind its checks.
-- A job that can only go into its lane is inserted here: a call of _place costs enqueue 5 to 10 % more CPU time.
create or replace function tallybook._put(p_job_id bigint, p_queue text, p_task text, p_args jsonb,
  p_run_at timestamptz, p_priority int, p_unique_key text, p_max_attempts int, p_headers jsonb, p_now timestamptz,
  p_order_key text default null, p_expires_at timestamptz default null, p_options jsonb default null) returns void
language plpgsql as $$
declare e tallybook.entry; v_done boolean;
begin
  select l.lane_id, l.retention into e.lane_id, e.retention
    from tallybook.lane l
   where l.queue = p_queue and l.priority = p_priority and l.part = '' and l.retired_at is null
   order by l.lane_id desc limit 1;
  if not found then
    select l.lane_id, l.retention into e.lane_id, e.retention from tallybook._lane(p_queue, p_priority, '') l;
  end if;
  if p_run_at is null and p_order_key is null and p_options is null then
    insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                                 task, args, headers, unique_key, expires_at)
    values (p_job_id, p_job_id, p_now, e.lane_id, 1, e.retention, 0, 0, p_max_attempts, p_task, p_args, p_headers,
            p_unique_key, p_expires_at);
    v_done := tallybook._wake(p_queue) is null;
    return;
  end if;
  e.job_id := p_job_id; e.seq := p_job_id; e.enqueued_at := p_now; e.attempt := 1; e.failures := 0; e.crashes := 0;
  e.task := p_task; e.args := p_args; e.headers := p_headers; e.unique_key := p_unique_key;
  e.max_attempts := p_max_attempts; e.order_key := p_order_key; e.expires_at := p_expires_at; e.options := p_options;
  v_done := tallybook._place(e, p_run_at, p_now, p_queue, true) is null;
end $$;
