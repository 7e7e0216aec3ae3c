-- _put(...): append a new job under a given id, where _place decides. The part of enqueue behind its checks.
-- A job that can only go into its lane is inserted here: a call of _place costs enqueue 5 to 10 % more CPU time.
create or replace function tallybook._put(p_job_id bigint, p_queue text, p_task text, p_args jsonb,
  p_run_at timestamptz, p_priority int, p_unique_key text, p_max_attempts int, p_headers jsonb, p_now timestamptz,
  p_order_key text default null, p_expires_at timestamptz default null, p_options jsonb default null) returns void
language plpgsql as $$
declare e tallybook.entry; v_shuffled boolean; v_done boolean;
begin
  select l.lane_id, l.retention, l.shuffled into e.lane_id, e.retention, v_shuffled
    from tallybook.lane l
   where l.queue = p_queue and l.priority = p_priority and l.part = '' and l.retired_at is null
   order by l.lane_id desc limit 1;
  if not found then
    select l.lane_id, l.retention into e.lane_id, e.retention from tallybook._lane(p_queue, p_priority, '') l;
    select l.shuffled into v_shuffled from tallybook.lane l where l.lane_id = e.lane_id;
  end if;
  if v_shuffled and p_order_key is null then p_options := tallybook._shuffled(p_options); end if;
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

-- _shuffled(options): the options of a new job that gets a random place among those that wait: a fair key that no other
-- job has, unless it has one.
create or replace function tallybook._shuffled(p_options jsonb) returns jsonb
language sql as $$ select jsonb_build_object('fair_key', gen_random_uuid()) || coalesce(p_options, '{}') $$;

-- _shuffled_many(lanes, order_keys, options): the options of new jobs of these lanes, as JSON text; see _shuffled.
create or replace function tallybook._shuffled_many(p_lanes int[], p_order_keys text[], p_options text[]) returns text[]
language sql as $$
  select array(select case when l.shuffled and f.order_key is null then tallybook._shuffled(f.options::jsonb)::text
                           else f.options end
                 from unnest(p_lanes, p_order_keys, p_options) with ordinality f(lane, order_key, options, n)
                 join tallybook.lane l on l.lane_id = f.lane order by f.n)
$$;
