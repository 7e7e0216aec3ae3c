-- _renumber(): set sequences that are behind past all numbers in use. A dump copies sequences, logical replication does
-- not. Job ids, and the numbers of lines, which come from the same sequence: those of this node. The number of a
-- fair_turn counts only within its lane, and each lane is new after a rebase.
-- Reads entry, order_line, concurrency_line, scheduled, waiting, dead, unique_key, subject_job, claim, lane, worker,
-- audit, clock_step.
create or replace function tallybook._renumber() returns void
language sql as $$
  -- The gap is for producers that draw numbers at the same moment.
  select setval('tallybook.job_id', least(t.n + 1000, q.seqmax))
    from pg_catalog.pg_sequence q, lateral (select max(x.n) as n from (
           select max(e.job_id) as n from tallybook.entry e where e.job_id between q.seqmin and q.seqmax
           union all select max(e.seq) from tallybook.entry e where e.seq between q.seqmin and q.seqmax
           union all select max(n.seq) from tallybook.order_line n where n.seq between q.seqmin and q.seqmax
           union all select max(n.seq) from tallybook.concurrency_line n where n.seq between q.seqmin and q.seqmax
           union all select max(w.fair_seq) from tallybook.waiting w where w.fair_seq between q.seqmin and q.seqmax
           union all select max(a.job_id) from tallybook._aside a where a.job_id between q.seqmin and q.seqmax
           union all select max(u.job_id) from tallybook.unique_key u where u.job_id between q.seqmin and q.seqmax
           union all
           select max(j.job_id) from tallybook.subject_job j where j.job_id between q.seqmin and q.seqmax) x) t
   where q.seqrelid = 'tallybook.job_id'::regclass
     and t.n > coalesce(pg_catalog.pg_sequence_last_value(q.seqrelid), q.seqmin - 1);
  select setval(s.seq, s.top)
    from (values ('tallybook.claim_id'::regclass, (select max(c.id) from tallybook.claim c)),
                 ('tallybook.worker_id_seq', greatest((select max(w.id) from tallybook.worker w),
                                                      (select max(c.worker_id) from tallybook.claim c))),
                 ('tallybook.lane_lane_id_seq', (select max(l.lane_id) from tallybook.lane l)),
                 ('tallybook.audit_id_seq', (select max(a.id) from tallybook.audit a)),
                 ('tallybook.clock_step_id_seq', (select max(c.id) from tallybook.clock_step c))) s(seq, top)
   where s.top > coalesce(pg_catalog.pg_sequence_last_value(s.seq), 0)
$$;
