-- _skip(lane, retention, xids, seqs, at): those of these entries that have a tombstone; ends the cancelled ones.
--
-- Called by _take under the lane's lock. Never waits, because nobody else ends an attempt that no claim has taken. The
-- tombstone is deleted with its entry, unless it is of an earlier attempt in another lane. One that is both taken and
-- cancelled stays for the heartbeat of the worker that took the job.
-- profile: nested
create or replace function tallybook._skip(p_lane_id int, p_retention "char", p_xids xid8[], p_seqs bigint[],
  p_at timestamptz default clock_timestamp())
returns bigint[] language sql as $$
  with met as materialized (
    select e.xid, e.seq, e.job_id, e.attempt, e.task, bool_or(t.taken and t.attempt = e.attempt) as taken,
           max(t.reason) filter (where t.cancelled) as reason
      from unnest(p_xids, p_seqs) f(xid, seq)
      join tallybook.entry e on e.lane_id = p_lane_id and e.retention = p_retention and e.xid = f.xid and e.seq = f.seq
      join tallybook.tombstone t on t.job_id = e.job_id
       and (t.taken and t.attempt = e.attempt or t.cancelled
            and (t.attempt = e.attempt or t.attempt < e.attempt and not t.once))
     group by e.xid, e.seq, e.job_id, e.attempt, e.task
  ), ended as (
    insert into tallybook.outcome (entry_xid, entry_seq, job_id, ended_at, retention, state, error)
    select m.xid, m.seq, m.job_id, p_at, p_retention, 'cancelled',
           case when m.reason is not null then jsonb_build_object('message', m.reason) end
      from met m where not m.taken order by m.job_id, m.attempt
    on conflict do nothing returning entry_xid, entry_seq
  ), told as (
    insert into tallybook.tally (lane_id, n, attempts, what, task)
    select p_lane_id, count(*), sum(m.attempt), w.what::tallybook.counted, m.task
      from ended d join met m on m.xid = d.entry_xid and m.seq = d.entry_seq cross
           join unnest('{cancelled,unclaimed}'::text[]) w(what)
     group by m.task, w.what
  ), free as materialized (
    select t.job_id, t.attempt from tallybook.tombstone t join met m on m.job_id = t.job_id
     where case when m.taken then t.attempt = m.attempt and not t.cancelled
                -- once: stands elsewhere
                else t.cancelled and not t.taken and (t.attempt = m.attempt or t.attempt < m.attempt and not t.once) end
       for update of t skip locked
  ), gone as (
    delete from tallybook.tombstone t using free f where t.job_id = f.job_id and t.attempt = f.attempt
  )
  select coalesce(array_agg(m.seq order by m.seq), '{}') from met m
$$;
