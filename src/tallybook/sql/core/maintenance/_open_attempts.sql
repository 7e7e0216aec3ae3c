-- _open_attempts(worker, open_from, upto): the attempts that a worker has claimed and not ended, from its watermark up
-- to one of its claims.
-- profile: nested
create or replace function tallybook._open_attempts(p_worker int, p_open_from bigint,
  p_upto bigint default 9223372036854775807)
returns table (lane_id int, retention "char", xid xid8, seq bigint, job_id bigint, attempt int)
language plpgsql stable as $$
#variable_conflict use_column
begin
  return query
  select c.lane_id, c.retention, e.xid, e.seq, e.job_id, e.attempt
    from tallybook.claim c, lateral (
      (select e.xid, e.seq, e.job_id, e.attempt from tallybook.entry e
       where c.one_xid is null and c.closed = '{}' and e.lane_id = c.lane_id and e.retention = c.retention
         and e.xid >= c.from_xid and (e.xid, e.seq) > (c.from_xid, c.from_seq)
         and e.xid <= c.pos_xid and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
         and e.xid <> all (c.holes) and e.seq <> all (c.skipped)
       order by e.xid, e.seq limit c.jobs)  -- the limit: see claimed_jobs
      union all
      select e.xid, e.seq, e.job_id, e.attempt
        from unnest(case when c.one_xid is not null then array[c.one_xid] else c.closed end) x(xid), lateral (
          select y.* from tallybook.entry y  -- a join could begin with the whole lane
           where y.lane_id = c.lane_id and y.retention = c.retention and y.xid = x.xid
             and y.seq > case when c.one_xid is not null then c.one_seq - 1 when x.xid = c.from_xid then c.from_seq
                 else 0 end
             and y.seq <= case when c.one_xid is not null then c.one_seq when x.xid = c.pos_xid then c.pos_seq
                 else 9223372036854775807 end
             and (c.one_xid is not null or x.xid >= c.from_xid and x.xid <= c.pos_xid)
             and y.seq <> all (c.skipped) offset 0) e) e
   where c.worker_id = p_worker and c.id >= p_open_from and c.id <= p_upto
     and not exists (select from tallybook.outcome o where o.retention = c.retention and o.entry_xid = e.xid
                     and o.entry_seq = e.seq);
end $$;
