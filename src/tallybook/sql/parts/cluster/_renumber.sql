-- _renumber(): set the sequences past every number in use, where they are behind. A dump brings them along, a logical
-- replication does not. Job ids: those of this node. Reads entry, order_line, scheduled, waiting, dead, unique_key,
-- subject_job, claim, lane, worker.
create or replace function tallybook._renumber() returns void
language plpgsql as $$
declare
  v_first bigint; v_last bigint; v_top bigint;
begin
  select q.seqmin, q.seqmax into v_first, v_last from pg_sequence q where q.seqrelid = 'tallybook.job_id'::regclass;
  select max(x.n) into v_top from (
    select max(e.job_id) as n from tallybook.entry e where e.job_id between v_first and v_last
    union all select max(e.seq) from tallybook.entry e where e.seq between v_first and v_last
    union all select max(n.seq) from tallybook.order_line n where n.seq between v_first and v_last
    union all select max(s.job_id) from tallybook.scheduled s where s.job_id between v_first and v_last
    union all select max(w.job_id) from tallybook.waiting w where w.job_id between v_first and v_last
    union all select max(d.job_id) from tallybook.dead d where d.job_id between v_first and v_last
    union all select max(u.job_id) from tallybook.unique_key u where u.job_id between v_first and v_last
    union all select max(j.job_id) from tallybook.subject_job j where j.job_id between v_first and v_last) x;
  -- A producer may draw numbers at this moment: hence the space.
  perform setval('tallybook.job_id', least(v_top + 1000, v_last)) from tallybook.job_id q
          where q.last_value + q.is_called::int <= v_top;
  select max(c.id) into v_top from tallybook.claim c;
  perform setval('tallybook.claim_id', v_top) from tallybook.claim_id q where q.last_value + q.is_called::int <= v_top;
  select greatest((select max(w.id) from tallybook.worker w), (select max(c.worker_id) from tallybook.claim c))
         into v_top;
  perform setval('tallybook.worker_id_seq', v_top) from tallybook.worker_id_seq q
          where q.last_value + q.is_called::int <= v_top;
  select max(l.lane_id) into v_top from tallybook.lane l;
  perform setval('tallybook.lane_lane_id_seq', v_top) from tallybook.lane_lane_id_seq q
          where q.last_value + q.is_called::int <= v_top;
end $$;
