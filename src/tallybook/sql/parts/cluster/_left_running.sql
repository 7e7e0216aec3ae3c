-- _left_running(): the attempts that workers of another cluster had claimed and not ended when this copy of the
-- database was made.
--
-- A claim has the number of its jobs. Its interval may contain more by now: jobs enqueued here under transaction ids
-- that lie between those of the other cluster. Their numbers (seq) are higher than all that came with the copy, so the
-- first `jobs` by number are the claimed ones. That relies on the sequence job_id, which came with the copy, or was set
-- before the first enqueue. If it is wrong, a waiting job is shown as started once; it is in line in any case. Ended
-- workers have no open attempts, see rescue. Reads worker, claim, entry, outcome.
-- profile: nested
create or replace function tallybook._left_running() returns table (xid xid8, seq bigint, worker text)
language sql stable
set enable_nestloop = on  -- also if the caller has switched it off
as $$
  select e.xid, e.seq, w.name
    from tallybook.worker w
    join tallybook.claim c on c.worker_id = w.id and c.id >= w.open_from, lateral (
      select i.xid, i.seq, row_number() over (order by i.seq) as n from (
        select e.xid, e.seq from tallybook.entry e
         where c.one_xid is null and c.closed = '{}' and e.lane_id = c.lane_id and e.retention = c.retention
           and e.xid >= c.from_xid and (e.xid, e.seq) > (c.from_xid, c.from_seq)
           and e.xid <= c.pos_xid and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
           and e.xid <> all (c.holes) and e.seq <> all (c.skipped)
        union all
        select e.xid, e.seq
          from unnest(case when c.one_xid is not null then array[c.one_xid] else c.closed end) x(xid), tallybook.entry e
         where e.lane_id = c.lane_id and e.retention = c.retention and e.xid = x.xid
           and case when c.one_xid is not null then e.seq = c.one_seq
                    else (e.xid, e.seq) > (c.from_xid, c.from_seq) and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq) end
           and e.seq <> all (c.skipped)) i) e
   where w.ended_at is null and e.n <= c.jobs
     and not exists (select from tallybook._outcome_of(c.retention, e.xid, e.seq))
$$;
