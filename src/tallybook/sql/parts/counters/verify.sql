-- verify(): recount everything, and return the differences from counts(); no rows: they agree. Both are from the same
-- moment.
--
-- If counts() leaves running jobs unattributed, the numbers of a task may differ by as many; those of the queue do not.
-- It reads all open jobs and counts the ledgers: about ten seconds for ten million jobs. A difference is a defect in
-- Tallybook: please report it; recount() corrects the counters.
--   queue, task  both null for a difference of a whole ledger, whose rows do not name their queue; task null for one of
--                a whole queue
--   what         a state, an ending, or attempts: the number of those without an outcome, compared with the jobs that
--                are available or running
-- Reads what counts reads, and all ledgers and tables of jobs.
-- profile: whole
-- rights: operator
create or replace function tallybook.verify() returns table (queue text, task text, what text, counted bigint,
  found bigint) language sql stable as $$
  with counted as materialized (
    select l.queue, c.task, c.what, c.n from tallybook._counted_of(null) c join tallybook.lane l using (lane_id)
  ), open as materialized (
    select l.queue, c.task, c.what, c.n
      from tallybook._recounted_open() c join tallybook.lane l on l.lane_id = c.lane_id
  ), unattributed as (
    select c.queue, sum(c.n) as n from counted c where c.what = 'unattributed' group by c.queue
  ), jobs as (
    select x.queue, x.task, x.what, sum(x.counted) as counted, sum(x.found) as found
      from (select c.queue, c.task, c.what, c.n as counted, 0 as found from counted c
             where c.what in ('scheduled', 'retrying', 'waiting', 'available', 'running', 'dead')
            union all select f.queue, f.task, f.what, 0, f.n from open f) x
     group by x.queue, x.task, x.what
  ), whole as (
    select j.queue, j.what, sum(j.counted) as counted, sum(j.found) as found
      from jobs j join unattributed u on u.queue = j.queue group by j.queue, j.what
    union all
    select null, x.what, sum(x.counted), sum(x.found)
      from (select c.what, c.n as counted, 0 as found from counted c
             where c.what in ('completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'died')
            union all select replace(o.state::text, 'dead', 'died'), 0, count(*)
                        from tallybook.outcome o group by o.state
            union all select replace(e.key, 'dead', 'died'), 0, e.value::bigint
                        from tallybook.pruned p, jsonb_each_text(p.ended) e) x
     group by x.what
    union all
    select null, 'attempts', (select count(*) from tallybook.entry) - (select count(*) from tallybook.outcome)
           - (select count(*) from tallybook.lane l join tallybook.entry e on e.lane_id = l.lane_id
                                   and e.retention = l.retention
               where l.retired_at is not null and not exists (
                 select from tallybook.outcome o where o.retention = e.retention and o.entry_xid = e.xid
                        and o.entry_seq = e.seq)),
           coalesce((select sum(f.n) from open f where f.what in ('available', 'running')), 0)
  ), found as (
    select j.queue, j.task, j.what, j.counted, j.found from jobs j left join unattributed u on u.queue = j.queue
     where abs(j.counted - j.found) > case when j.what in ('available', 'running') then coalesce(u.n, 0) else 0 end
    union all select w.queue, null, w.what, w.counted, w.found from whole w where w.counted <> w.found
  )
  select f.queue, f.task, f.what, f.counted::bigint, f.found::bigint
    from found f where exists (select from tallybook.fold) order by 1, 2, 3
$$;
