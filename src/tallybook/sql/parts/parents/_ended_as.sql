-- _ended_as(job_ids): how these jobs have ended for good: completed, cancelled, dead, gone (no record is left); null:
-- they have not.
--
-- One statement, so a job that moves from scheduled to its lane is not missed. A cancel counts when _job_open reports
-- that the job will never start. failure: the facts for the children of a job that did not complete.
-- Reads entry, outcome, scheduled, waiting, dead, tombstone.
-- profile: nested
create or replace function tallybook._ended_as(p_job_ids bigint[]) returns table (job_id bigint, ended_as text,
  failure jsonb) language plpgsql stable as $$
begin
  return query
  select f.id, f.ended_as,
         case when f.ended_as <> 'completed' then
           jsonb_build_object('job', f.id, 'task', f.task, 'state', f.ended_as, 'reason', f.reason, 'message',
                              left(f.message, 200)) end
    from (
    select i.id, coalesce(a.task, e.task) as task, a.reason,
           coalesce(case when a.place = 'dead' then a.errors -> -1 ->> 'message' end, o.error ->> 'message',
                    t.reason) as message,
           case when a.place = 'dead' then 'dead'
                when a.place is not null or e.job_id is not null and o.state is null
                then case when t.job_id is not null and not tallybook._job_open(i.id) then 'cancelled' end
                when e.job_id is null then 'gone'
                when o.state in ('completed', 'cancelled') then o.state::text
                -- a dropped dead letter: the last attempt has ended, and nothing follows
                else 'dead' end as ended_as
      from unnest(p_job_ids) i(id)
      left join lateral (select x.* from tallybook._aside x where x.job_id = i.id limit 1) a on true
      left join lateral tallybook._newest_entry(i.id) e on true
      left join lateral tallybook._outcome_of(e.retention, e.xid, e.seq) o on true
      left join lateral (select x.job_id, x.reason from tallybook.tombstone x
                          where x.job_id = i.id and x.cancelled and not x.once order by x.attempt desc
                                limit 1) t on true) f;
end $$;
