-- _rescue_attempts(worker, max_crashes, at): end the open attempts of a dead worker as lost and place their next
-- attempts.
-- Returns lost, their number; rest: some could not be ended now. Called by rescue, behind the worker's gate and with
-- its lock timeout.
-- A worker whose session still exists is only silent: the network may hide it, and it may live. Its attempts then count
-- as crashes, but make a job dead only at three times the limit, even if it ran alone. The same holds for an attempt
-- that a lock kept back when others of its worker were rescued: it did not run alone.
create or replace function tallybook._rescue_attempts(w tallybook.worker, p_max_crashes int, p_at timestamptz,
  out lost int, out rest boolean)
language plpgsql as $$
declare c record; e tallybook.entry; v_error jsonb; v_died boolean := not w.session or tallybook._session_gone(w.id);
  v_alone boolean;
begin
  lost := 0; rest := false;
  for c in select h.*, count(*) over () = 1 as alone from tallybook._open_attempts(w.id, w.open_from) h
    order by h.job_id, h.attempt loop
    begin
      v_error := jsonb_build_object('attempt', c.attempt, 'at', p_at, 'type', 'WorkerLost', 'worker', w.name,
                                    'started_at', (select k.claimed_at from tallybook._claim_of(c.lane_id,
                                        c.retention, c.xid, c.seq) k),
                                    'message', format('worker %s died, or could not be reached', w.name));
      insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
      values (c.xid, c.seq, c.job_id, p_at, c.retention, 'lost', v_error)
      on conflict do nothing;
      continue when not found;
      select x.* into strict e from tallybook.entry x
       where x.lane_id = c.lane_id and x.retention = c.retention and x.xid = c.xid and x.seq = c.seq;
      insert into tallybook.tally (lane_id, n, attempts, what, task) values (e.lane_id, 1, e.attempt, 'lost', e.task);
      v_alone := c.alone and v_died;
      if v_alone and e.crashes + 1 >= p_max_crashes then  -- none of this worker was rescued before
        v_alone := not exists (
          select from tallybook.outcome o
            join tallybook.entry x on x.job_id = o.job_id and x.xid = o.entry_xid and x.seq = o.entry_seq
           cross join lateral tallybook._claim_of(x.lane_id, x.retention, x.xid, x.seq) k
           where o.state = 'lost' and o.ended_at >= greatest(w.seen_at, w.started_at) and o.job_id <> e.job_id
             and o.error ->> 'type' = 'WorkerLost' and o.error ->> 'worker' = w.name and k.worker_id = w.id);
      end if;
      perform tallybook._lost(tallybook._amended(e, p_at), v_error, p_at, p_max_crashes, v_alone, interval '0');
      lost := lost + 1;
    exception when lock_not_available then
      rest := true;
    when others then  -- one job that cannot be put back must not hold up the others
      rest := true;
      raise warning 'job % of worker % cannot be rescued: %', c.job_id, w.name, sqlerrm;
    end;
  end loop;
end $$;
