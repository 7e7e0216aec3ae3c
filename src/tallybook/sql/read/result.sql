-- result(job_id): return how a job ended. No row: there is no such job, or it has not been committed.
--   state   completed, cancelled, dead; null: it has not ended
--   result  the return value of the handler, or null; error: why there is none
-- profile: nested
-- rights: operator
create or replace function tallybook.result(job_id bigint, out task text, out state text, out result jsonb,
  out error jsonb)
returns setof record language plpgsql as $$
declare
  v_job_id bigint := result.job_id; e tallybook.entry := tallybook._newest_entry(result.job_id); o tallybook.outcome;
begin
  select x.* into o from tallybook._outcome_of(e.retention, e.xid, e.seq) x;
  task := e.task; state := o.state; result := o.result; error := o.error;
  if state is distinct from 'completed' then
    if task is null then select s.task into task from tallybook.scheduled s where s.job_id = v_job_id; end if;
    -- The table shows whether it is cancelled or dead. All other jobs are open.
    select d.task, 'dead', d.errors -> -1 into task, state, error from tallybook.dead d where d.job_id = v_job_id;
    if not found then
      select j.task, case when j.state = 'cancelled' then j.state end, jsonb_build_object('message', j.reason)
        into task, state, error from tallybook.job j where j.id = v_job_id;
      if not found and e.task is not null then  -- a dropped dead letter: only its history remains
        task := e.task; state := 'dead'; error := o.error;
      end if;
    end if;
    result := null;
    if state is null then error := null; end if;
  end if;
  if task is not null then return next; end if;
end $$;
