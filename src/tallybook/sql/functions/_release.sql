-- _release(order_key): put the next job of an order key back in line, if it waits and nobody has the turn.
--
-- Said by every verb that ends a job with an order key for good, after the end, and by rescue for what was missed (an end
-- at another isolation level, a row that was locked). The lock is kept to the commit: who puts a job aside takes it, too,
-- so that no job is put aside after the look. Locks: the key (class 1413565448). Reads order_turn, order_line; writes entry.
create or replace function tallybook._release(p_key text) returns void
language plpgsql as $$
declare
  v_holder bigint; l record; w tallybook.waiting; v_lane record; v_now timestamptz := clock_timestamp();
begin
  perform pg_advisory_xact_lock(1413565448, hashtext(p_key));
  select t.job_id into v_holder from tallybook.order_turn t where t.key = p_key order by t.generation desc limit 1;
  if found and tallybook._job_open(v_holder) then return; end if;
  for l in select n.seq, n.job_id from tallybook.order_line n where n.key = p_key order by n.seq loop
    if not tallybook._job_open(l.job_id) then  -- cancelled before its turn
      delete from tallybook.order_line n where n.key = p_key and n.seq = l.seq;
      continue;
    end if;
    delete from tallybook.waiting x
     where x.job_id = (select y.job_id from tallybook.waiting y where y.job_id = l.job_id for update skip locked)
    returning x.* into w;
    if found then
      select n.lane_id, n.retention, n.queue into v_lane from tallybook.lane n where n.lane_id = w.lane_id;
      if w.run_at > v_now then  -- pushed to a later time while it waited: it lines up again then
        delete from tallybook.order_line n where n.key = p_key and n.seq = l.seq;
        insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, max_attempts, task, args,
                                         headers, unique_key, errors, expires_at, order_key, options)
        values (w.job_id, w.run_at, w.enqueued_at, w.lane_id, w.attempt, w.failures, w.crashes, w.max_attempts, w.task, w.args,
                w.headers, w.unique_key, w.errors, w.expires_at, w.order_key, w.options);
        continue;
      end if;
      insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts, task, args,
                                   headers, unique_key, run_at, errors, expires_at, order_key, options)
      values (nextval('tallybook.job_id'), w.job_id, w.enqueued_at, w.lane_id, w.attempt, v_lane.retention, w.failures, w.crashes,
              w.max_attempts, w.task, w.args, w.headers, w.unique_key, w.run_at, w.errors, w.expires_at, w.order_key, w.options);
      perform tallybook._wake(v_lane.queue);
    end if;
    return;  -- the first of the line comes by itself, if it does not wait
  end loop;
end $$;

-- _release_missed(): look after a sample of the keys that jobs wait for; what no end has released goes on by this.
create or replace function tallybook._release_missed() returns void
language plpgsql as $$
declare
  v_key text;
begin
  for v_key in
    with recursive keys as (
      (select w.order_key from tallybook.waiting w order by w.order_key limit 1)
      union all
      select (select w.order_key from tallybook.waiting w where w.order_key > k.order_key order by w.order_key limit 1)
        from keys k where k.order_key is not null
    )
    select k.order_key from keys k where k.order_key is not null order by random() limit 1000 loop
    continue when not pg_try_advisory_xact_lock(1413565448, hashtext(v_key));  -- somebody is at it
    perform tallybook._release(v_key);
  end loop;
end $$;

-- _line_up(order_key, job_id): give a job that comes into line its place, the last one, unless it has one or its turn.
create or replace function tallybook._line_up(p_key text, p_job_id bigint) returns void
language plpgsql as $$
begin
  if not tallybook._has_turn(p_key, p_job_id)
     and not exists (select from tallybook.order_line n where n.job_id = p_job_id) then
    insert into tallybook.order_line (key, seq, job_id) values (p_key, nextval('tallybook.job_id'), p_job_id);
  end if;
end $$;

-- _has_turn(order_key, job_id): whether it is this job's turn.
create or replace function tallybook._has_turn(p_key text, p_job_id bigint) returns boolean
language plpgsql stable as $$
begin
  return p_job_id = (select t.job_id from tallybook.order_turn t where t.key = p_key order by t.generation desc limit 1);
end $$;
