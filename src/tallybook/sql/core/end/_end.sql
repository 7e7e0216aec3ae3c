-- _end(lease, job_id, attempt, state, error, at): insert the outcome of an attempt. Returns its entry, or null if the
-- lease no longer holds it.
--
-- The first step of every verb that ends an attempt other than by completing it. After null nothing else may happen.
-- profile: lookup
create or replace function tallybook._end(p_lease uuid, p_job_id bigint, p_attempt int, p_state tallybook.ending,
  p_error jsonb, p_at timestamptz default clock_timestamp())
returns tallybook.entry language plpgsql as $$
declare v_entry tallybook.entry; h record;
begin
  select * into h from tallybook._lease_entries(array[p_lease], array[p_job_id], array[p_attempt]);
  if not found then return null; end if;
  insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
  values (h.xid, h.seq, h.job_id, p_at, h.retention, p_state, p_error)
  on conflict do nothing;
  if not found then return null; end if;
  select e.* into strict v_entry from tallybook.entry e
   where e.lane_id = h.lane_id and e.retention = h.retention and e.xid = h.xid and e.seq = h.seq;
  insert into tallybook.tally (lane_id, n, attempts, what, task)
  values (v_entry.lane_id, 1, v_entry.attempt, (case when p_state = 'dead' then 'died'
                                                else p_state::text end)::tallybook.counted, v_entry.task);
  -- A cancelled job keeps what it was changed to: a person may retry it.
  if p_state = 'cancelled' then return v_entry; end if;
  return tallybook._amended(v_entry, p_at);
end $$;
