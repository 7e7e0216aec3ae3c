-- _place_waiting(waiting, at): a job that waited goes to its lane (true), or to scheduled if it was given a later time
-- (false). The caller has deleted its row.
create or replace function tallybook._place_waiting(w tallybook.waiting, p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
declare
  v_retention "char"; v_queue text;
begin
  select l.retention, l.queue into v_retention, v_queue from tallybook.lane l where l.lane_id = w.lane_id;
  perform tallybook._place(
    row(null, null, w.job_id, w.enqueued_at, w.lane_id, w.attempt, w.failures, w.crashes, w.max_attempts, v_retention,
        w.task, w.args, w.headers, w.unique_key, w.run_at, w.errors, w.expires_at, w.order_key, w.options)::tallybook.entry,
    w.run_at, p_at, v_queue);
  return coalesce(w.run_at <= p_at, true);
end $$;
