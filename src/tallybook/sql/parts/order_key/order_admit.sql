-- order_admit(leases, job_ids, attempts): return which claimed jobs with an order key may start. Call it before you
-- start them.
--
-- Jobs with the same order key run one at a time, in the order in which they became available. A job keeps its turn
-- until it has ended for good, even during a backoff, a snooze or a rescue. The jobs behind it are set aside (state
-- waiting), and each is released when the one before it has ended. For the caller, their attempt has ended.
--   ready    start these
--   busy     another transaction is deciding about their key: call again soon
--   patient  false: busy jobs are set aside, too, so that they hold no slot; rescue releases them if nothing else does.
--            Pass it after a while
-- Jobs in neither list no longer belong to the caller. A call handles 256 keys; jobs of further keys are returned as
-- busy. Needs READ COMMITTED (TB003). Locks: keys (class 1413565448), tried only.
-- Reads claim, entry, outcome, order_line; writes order_turn, order_line, waiting, outcome.
-- profile: nested
-- rights: worker
create or replace function tallybook.order_admit(leases uuid[], job_ids bigint[], attempts int[],
  patient boolean default true, at timestamptz default clock_timestamp(), out ready bigint[], out busy bigint[])
language plpgsql as $$
declare
  h record; l record; e tallybook.entry; v_generation bigint; v_holder bigint; v_locked boolean; v_mine boolean;
  v_keys text[] := '{}';
begin
  perform tallybook._read_committed('order_admit needs READ COMMITTED',
                                    'An older snapshot does not show which job has the turn.');
  ready := '{}'; busy := '{}';
  for h in select f.lease, k.*
             from unnest(leases, job_ids, attempts) f(lease, job_id, attempt),
                  lateral tallybook._lease_entries(array[f.lease], array[f.job_id], array[f.attempt]) k
            -- rescued meanwhile: it belongs to another worker
            where not exists (select from tallybook._outcome_of(k.retention, k.xid, k.seq))
            order by k.job_id loop
    if h.order_key is null then ready := ready || h.job_id; continue; end if;
    if h.order_key <> all (v_keys) then
      if cardinality(v_keys) = 256 then busy := busy || h.job_id; continue; end if;
      v_keys := v_keys || h.order_key;
    end if;
    v_locked := pg_try_advisory_xact_lock(1413565448, hashtext(h.order_key));
    v_generation := 0; v_holder := null; v_mine := null;
    select t.generation, t.job_id into v_generation, v_holder
      from tallybook.order_turn t where t.key = h.order_key order by t.generation desc limit 1;
    if v_locked and v_holder = h.job_id then ready := ready || h.job_id; continue; end if;
    if not v_locked and (patient or v_holder = h.job_id) then busy := busy || h.job_id; continue; end if;
    if v_locked and (v_holder is null or not tallybook._job_open(v_holder)) then
      v_mine := true;  -- unless another job is before it
      for l in select n.seq, n.job_id from tallybook.order_line n where n.key = h.order_key order by n.seq loop
        exit when l.job_id = h.job_id;
        if tallybook._job_open(l.job_id) then v_mine := false; exit; end if;
        delete from tallybook.order_line n where n.key = h.order_key and n.seq = l.seq;  -- cancelled before its turn
      end loop;
      if v_mine then
        insert into tallybook.order_turn (key, generation, job_id)
          values (h.order_key, coalesce(v_generation, 0) + 1, h.job_id);
        delete from tallybook.order_line n where n.job_id = h.job_id;
        ready := ready || h.job_id;
        continue;
      end if;
    end if;
    e := tallybook._end(h.lease, h.job_id, h.attempt, 'moved', null, order_admit.at);
    continue when e.job_id is null;
    e.attempt := e.attempt + 1;
    perform tallybook._wait(e, order_admit.at);
    -- A job that had its turn, died and was retried has lost its place: it is the last.
    perform tallybook._line_up(e.order_key, e.job_id)
      where not exists (select from tallybook.order_line n where n.job_id = e.job_id);
    -- the first job may be waiting, too
    if v_mine is false then perform tallybook._release(h.order_key, null, order_admit.at); end if;
  end loop;
end $$;
