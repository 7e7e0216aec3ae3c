-- _pruned_hint(job_id): what is to be said of a job that is not there: its history has gone, where its id says that
-- there was one. Null:
-- nothing is known. An id of this node that was given out, below all that are left.
create or replace function tallybook._pruned_hint(p_job_id bigint) returns text
language plpgsql stable
-- profile: lookup
as $$
declare
  v_first bigint; v_least bigint;
begin
  select q.seqmin into v_first from pg_catalog.pg_sequence q where q.seqrelid = 'tallybook.job_id'::regclass;
  if p_job_id < v_first or p_job_id > (select q.last_value from tallybook.job_id q)
     or not exists (select from tallybook.pruned) then
    return null;
  end if;
  v_least := least((select min(e.job_id) from tallybook.entry e where e.job_id >= v_first),
                   (select min(s.job_id) from tallybook.scheduled s where s.job_id >= v_first),
                   (select min(w.job_id) from tallybook.waiting w where w.job_id >= v_first),
                   (select min(d.job_id) from tallybook.dead d where d.job_id >= v_first));
  return case when p_job_id < coalesce(v_least, p_job_id + 1)
         then 'It is older than all that are left: it is past its retention.' end;
end $$;
