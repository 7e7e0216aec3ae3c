-- put_off(lease, job_id, attempt): end an attempt that was given a later time before it started (see leased, push_run_at).
-- Returns scheduled, available (the time has come), or refused.
create or replace function tallybook.put_off(lease uuid, job_id bigint, attempt int, at timestamptz default clock_timestamp()) returns text
language plpgsql as $$
declare
  v_run_at timestamptz; e tallybook.entry;
begin
  select a.run_at into v_run_at from tallybook.amendment a where a.job_id = put_off.job_id;
  e := tallybook._end(lease, job_id, attempt, 'moved', null);
  if e.job_id is null then return 'refused'; end if;
  perform tallybook._moved_to(e, v_run_at, at);
  return case when v_run_at > at then 'scheduled' else 'available' end;
end $$;

-- _moved_to(entry, run_at, at): what follows the end of an attempt that was put off.
create or replace function tallybook._moved_to(e tallybook.entry, p_run_at timestamptz, p_at timestamptz) returns void
language plpgsql as $$
begin
  if p_run_at > p_at and e.order_key is not null then  -- it lines up again when it is due
    delete from tallybook.order_line n where n.job_id = e.job_id;
    perform tallybook._release(e.order_key) where pg_try_advisory_xact_lock(1413565448, hashtext(e.order_key));  -- or rescue does
  end if;
  perform tallybook._back(e, p_run_at, p_at, e.failures, e.crashes, e.errors);
end $$;

-- _apply_amendments(at): move the jobs in line that a conflict of unique keys gave another priority or time.
--
-- Each is taken out of its line like by claim_job: a tombstone, then its lane's lock, which is only tried. Who was claimed
-- meanwhile keeps its priority; its time is seen by leased.
create or replace function tallybook._apply_amendments(p_at timestamptz) returns void
language plpgsql as $$
declare
  a record; e tallybook.entry; v_lane record; v_to record;
begin
  for a in select x.job_id, x.priority, x.run_at from tallybook.amendment x
            where x.priority is not null or x.run_at is not null order by x.job_id limit 200 for update skip locked loop
    select x.* into e from tallybook.entry x where x.job_id = a.job_id order by x.attempt desc limit 1;
    if not found or exists (select from tallybook.outcome o
                             where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq) then
      delete from tallybook.amendment x where x.job_id = a.job_id and not tallybook._job_open(a.job_id);
      continue;
    end if;
    continue when not pg_try_advisory_xact_lock(1413565441, e.lane_id);
    continue when tallybook._taken(e.lane_id, e.retention, e.xid, e.seq)
               or exists (select from tallybook.tombstone t where t.job_id = a.job_id and (t.cancelled or t.attempt = e.attempt));
    insert into tallybook.tombstone (job_id, attempt, taken) values (a.job_id, e.attempt, true) on conflict do nothing;
    continue when not found;
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state)
    values (e.xid, e.seq, e.job_id, clock_timestamp(), e.retention, 'moved');
    e := tallybook._amended(e);
    if a.priority is not null then
      select l.queue, l.part into v_lane from tallybook.lane l where l.lane_id = e.lane_id;
      select * into v_to from tallybook._lane(v_lane.queue, a.priority, v_lane.part);
      e.lane_id := v_to.lane_id; e.retention := v_to.retention;
    end if;
    perform tallybook._moved_to(e, a.run_at, p_at);
  end loop;
end $$;
