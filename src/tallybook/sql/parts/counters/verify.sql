-- verify(): recount everything, and return where counts() differs from it; no rows: they agree. Both are of one moment.
--
-- Where counts() leaves jobs that run unattributed, the numbers of a task may differ by as many, those of the queue
-- not.
-- It reads all that is open, and counts the ledgers: some seconds for ten million jobs. Where it finds something, that
-- is a defect of ours: please report it; recount() sets the counters right.
--   queue, task  both null where a difference is of a whole ledger, whose rows do not name their queue; task null where
--                it is of a whole queue
--   what         a state, or an ending, or attempts: those without an end, against what waits and what runs
-- Reads what counts reads, and all ledgers and tables of jobs.
-- rights: operator
create or replace function tallybook.verify() returns table (queue text, task text, what text, counted bigint,
  found bigint)
language plpgsql stable
-- profile: whole
as $$
#variable_conflict use_column
begin
  if not exists (select from tallybook.fold) then return; end if;
  return query
  with counted as materialized (
    select c.lane_id, c.task, c.what, c.n from tallybook._counted() c
  ), found as materialized (
    select c.lane_id, c.task, c.what, c.n from tallybook._recounted_open() c
  ), jobs as (
    select l.queue, x.task, x.what, sum(x.counted)::bigint as counted, sum(x.found)::bigint as found
      from (select c.lane_id, c.task, c.what, c.n as counted, 0 as found from counted c
             where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead')
            union all select f.lane_id, f.task, f.what, 0, f.n from found f) x
      join tallybook.lane l on l.lane_id = x.lane_id
     group by l.queue, x.task, x.what
  ), unattributed as (
    select l.queue, sum(c.n) as n from counted c join tallybook.lane l on l.lane_id = c.lane_id
     where c.what = 'unattributed' group by l.queue
  ), queues as (
    select j.queue, j.what, sum(j.counted)::bigint as counted, sum(j.found)::bigint as found
      from jobs j join unattributed u on u.queue = j.queue group by j.queue, j.what
  ), ends as (
    select x.what, sum(x.counted)::bigint as counted, sum(x.found)::bigint as found
      from (select c.what, c.n as counted, 0 as found from counted c
             where c.what in ('completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'died')
            union all select case when o.state = 'dead' then 'died' else o.state::text end, 0, count(*)
              from tallybook.outcome o group by o.state
            union all select case when e.key = 'dead' then 'died' else e.key end, 0, e.value::bigint
                        from tallybook.pruned p, jsonb_each_text(p.ended) e) x
     group by x.what
  ), attempts as (
    select 'attempts' as what, (select count(*) from tallybook.entry) - (select count(*) from tallybook.outcome)
           - (select count(*) from tallybook.lane l join tallybook.entry e on e.lane_id = l.lane_id
              and e.retention = l.retention
               where l.retired_at is not null and not exists (
                 select from tallybook.outcome o where o.retention = e.retention and o.entry_xid = e.xid
                        and o.entry_seq = e.seq)) as counted,
           coalesce((select sum(f.n) from found f where f.what in ('available', 'running')), 0) as found
  )
  select j.queue, j.task, j.what, j.counted, j.found from jobs j left join unattributed u on u.queue = j.queue
   where abs(j.counted - j.found) > case when j.what in ('available', 'running') then coalesce(u.n, 0) else 0 end
  union all select q.queue, null, q.what, q.counted, q.found from queues q where q.counted <> q.found
  union all select null, null, e.what, e.counted, e.found from ends e where e.counted <> e.found
  union all select null, null, a.what, a.counted, a.found::bigint from attempts a where a.counted <> a.found;
end $$;
