-- _lease_entries(leases, job_ids, attempts): the entries of these attempts, if their lease still holds them.
--
-- The fence of every verb that ends an attempt. The claim is looked up by its random lease, so a claim that a crash or
-- a failover undid is not found. The entry is looked up by its job inside the claim's interval, so its transaction id
-- comes from the claim and not from the caller.
-- If most jobs of a claim end, its interval is read at once; if few end, they are looked up. Each is slow for the
-- other.
-- ready_at: since when the job could have been claimed.
-- "offset 0" keeps the planner on the index by job, whatever it estimates for empty tables.
-- profile: batch
create or replace function tallybook._lease_entries(p_leases uuid[], p_job_ids bigint[], p_attempts int[])
returns table (lane_id int, retention "char", xid xid8, seq bigint, job_id bigint, attempt int, order_key text,
               task text, claimed_at timestamptz, ready_at timestamptz) language plpgsql stable as $$
#variable_conflict use_column
declare c record; f record;
begin
  for c in select d.lease, d.n, k.* from (
             select l as lease, count(*) as n from unnest(p_leases) l group by l) d, lateral (
             select k.lane_id, k.retention, k.claimed_at, k.from_xid, k.from_seq, k.pos_xid, k.pos_seq, k.one_xid,
                    k.one_seq, k.jobs, k.holes, k.closed, k.skipped
               from tallybook.claim k where k.lease = d.lease limit 1) k loop
    if c.n * 8 >= c.jobs and c.one_xid is null and c.closed = '{}' then
      return query
      select c.lane_id, c.retention, e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task, c.claimed_at, e.ready_at
        from (select e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task,
              greatest(e.run_at, e.enqueued_at) as ready_at from tallybook.entry e
               where e.lane_id = c.lane_id and e.retention = c.retention
                 and e.xid >= c.from_xid and (e.xid, e.seq) > (c.from_xid, c.from_seq)
                 and e.xid <= c.pos_xid and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
                 and e.xid <> all (c.holes) and e.seq <> all (c.skipped)
               order by e.xid, e.seq limit c.jobs) e  -- the limit: see claimed_jobs
        join (select u.job_id, u.attempt from unnest(p_leases, p_job_ids, p_attempts) u(lease, job_id, attempt)
               where u.lease = c.lease) f on f.job_id = e.job_id and f.attempt = e.attempt;
    else
      for f in select u.job_id, u.attempt from unnest(p_leases, p_job_ids, p_attempts) u(lease, job_id, attempt)
                where u.lease = c.lease loop
        if f.attempt > 1 then  -- a job that lives on has thousands of attempts: by the index of these
          return query
          select c.lane_id, c.retention, e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task, c.claimed_at,
                 greatest(e.run_at, e.enqueued_at)
            from tallybook._attempt(f.job_id, f.attempt) e
           where e.lane_id = c.lane_id and e.retention = c.retention and e.seq <> all (c.skipped)
             and case when c.one_xid is not null then e.xid = c.one_xid and e.seq = c.one_seq
                      else (e.xid, e.seq) > (c.from_xid, c.from_seq) and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
                           and case when c.closed <> '{}' then e.xid = any (c.closed)
                               else e.xid <> all (c.holes) end end;
        else
          return query
          select c.lane_id, c.retention, e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task, c.claimed_at,
                 greatest(e.run_at, e.enqueued_at)
            from (select e.lane_id, e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task, e.run_at, e.enqueued_at
                  from tallybook.entry e
                   where e.retention = c.retention and e.job_id = f.job_id and e.attempt = f.attempt offset 0) e
           where e.lane_id = c.lane_id and e.seq <> all (c.skipped)
             and case when c.one_xid is not null then e.xid = c.one_xid and e.seq = c.one_seq
                      else (e.xid, e.seq) > (c.from_xid, c.from_seq) and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
                           and case when c.closed <> '{}' then e.xid = any (c.closed)
                               else e.xid <> all (c.holes) end end;
        end if;
      end loop;
    end if;
  end loop;
end $$;
