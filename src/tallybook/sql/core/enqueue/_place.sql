-- _place(entry, run_at, at, queue, fair): put the next attempt of a job where it belongs, and wake the workers that
-- sleep there.
--
-- The whole job is in one row, in the form of an entry; its number in the lane may be null. Before run_at the job is
-- scheduled. After it the job enters its lane, or, with fair, waits for its turn among the fair keys of its queue. The
-- lane holds 200 of these, so a few hundred that are retried at once would keep all other keys out.
--   queue  the name of the lane's queue, if the caller has it
-- Reads lane; writes scheduled, waiting or entry, and order_line for a job that enters its lane for the first time.
create or replace function tallybook._place(e tallybook.entry, p_run_at timestamptz, p_at timestamptz,
  p_queue text default null, p_fair boolean default false) returns void
language plpgsql as $$
declare v_done boolean;
begin
  if p_run_at > p_at then
    insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts,
                                     task, args, headers, unique_key, errors, expires_at, order_key, options)
    values (e.job_id, p_run_at, e.enqueued_at, e.lane_id, e.attempt, e.failures, e.crashes, e.max_attempts, e.task,
            e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key, e.options);
    if p_run_at < p_at + interval '10 s' then perform tallybook._wake(' promote'); end if;
  elsif p_fair and e.options ? 'fair_key' and not e.options ? 'turn' then
    e.lane_id := tallybook._lane_beside(e.lane_id, 'fair');
    perform tallybook._wait(e, p_at, e.options ->> 'fair_key');
    perform tallybook._wake(' fair_release');
  else
    e.xid := pg_current_xact_id();
    if e.seq is null then e.seq := nextval('tallybook.job_id'); end if;
    insert into tallybook.entry values (e.*);
    if e.order_key is not null and e.seq = e.job_id then  -- its first entry
      perform tallybook._line_up(e.order_key, e.job_id, e.seq);
    end if;
    if p_queue is null then select l.queue into p_queue from tallybook.lane l where l.lane_id = e.lane_id; end if;
    v_done := tallybook._wake(p_queue) is null;
  end if;
end $$;

-- _wait(entry, at, fair_key): set a job aside until others let it continue; see the state waiting in
-- https://github.com/tallybook/tallybook/blob/main/docs/states.md.
create or replace function tallybook._wait(e tallybook.entry, p_at timestamptz,
  p_fair_key text default null) returns void
language plpgsql as $$
begin
  insert into tallybook.waiting (job_id, waits_since, enqueued_at, run_at, lane_id, attempt, failures, crashes,
                                 max_attempts, task, args, headers, unique_key, errors, expires_at, order_key, options,
                                 fair_key, fair_seq)
  values (e.job_id, p_at, e.enqueued_at, e.run_at, e.lane_id, e.attempt, e.failures, e.crashes, e.max_attempts, e.task,
          e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key, e.options, p_fair_key,
          case when p_fair_key is not null then coalesce(e.seq, nextval('tallybook.job_id')) end);
end $$;

-- _entry_of(row): a row of scheduled, waiting or dead as an entry of its lane, with a new number there.
create or replace function tallybook._entry_of(p_row jsonb) returns tallybook.entry
language sql as $$
  select e.* from tallybook.lane l, jsonb_populate_record(null::tallybook.entry, p_row || jsonb_build_object(
           'xid', pg_current_xact_id()::text, 'seq', nextval('tallybook.job_id'), 'retention', l.retention)) e
   where l.lane_id = (p_row ->> 'lane_id')::int
$$;
