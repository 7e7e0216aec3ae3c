-- _pace(ids, at): which of these jobs in scheduled, that are due and locked, may come into line now; the others get a
-- later time.
--
-- Those that wait for their turn at a rate limit (options.turn) come as fast as they can start, however many of them
-- are overdue: after an outage, or where the workers are slow, all of them would come at once, find that it is not
-- their turn, and be written once more each.
-- Their order is kept, but for jobs of priority 0 and 1, which go first. What comes is asked by limit_take all the
-- same. A key that somebody has locked is looked at again in 10 ms.
-- Reads limit_rule, tombstone, lane; writes rate_state, scheduled.
create or replace function tallybook._pace(p_ids bigint[], p_at timestamptz) returns bigint[]
language plpgsql
-- profile: hot
set enable_mergejoin = off  -- the rows are few
as $$
declare
  c_early constant interval := '120 ms';  -- as in limit_take
  v_now bigint[];
begin
  with due as materialized (
    select d.job_id, s.run_at, l.priority < 2 as urgent,
           case when not exists (select from tallybook.tombstone t where t.job_id = d.job_id and t.cancelled)
                then s.options ->> 'turn' end as key
      from unnest(p_ids) d(job_id)
      cross join lateral (select s.run_at, s.options, s.lane_id from tallybook.scheduled s where s.job_id = d.job_id
                          limit 1) s
      join tallybook.lane l on l.lane_id = s.lane_id
  ), keys as materialized (
    select k.key, r.gap, r.burst from (select distinct d.key from due d where d.key is not null) k
      cross join lateral (select tallybook._step(r.most, r.per, r.burst) as gap, r.burst
                          from tallybook._limit_of('rate', k.key) r) r
  ), mine as materialized (
    select s.name, s.next_at, s.promised_at, s.paced_to from tallybook.rate_state s
     where s.name = any (array(select k.key from keys k)) order by s.name for update skip locked
  ), placed as materialized (
    select d.job_id, d.key, k.gap, m.name is not null as mine,
           case when exists (select from tallybook.scheduled w where w.options ? 'turn' and w.options ->> 'turn' = d.key
                                and w.run_at > p_at) then m.paced_to end as paced_to,
           greatest(m.next_at, m.promised_at, p_at - (k.burst - 1) * k.gap) as base,
           row_number() over (partition by d.key order by d.urgent desc, d.run_at, d.job_id) - 1 as place
      from due d join keys k on k.key = d.key left join mine m on m.name = d.key
  ), passed as materialized (
    select p.*, p.mine and p.base + p.place * p.gap <= p_at + c_early + interval '30 ms' as passes from placed p
  ), per_key as materialized (
    select p.key, min(p.gap) as gap, count(*) filter (where p.passes) as passing,
           count(*) filter (where not p.passes) as held, min(p.base) as base, min(p.paced_to) as paced_to
      from passed p where p.mine group by p.key
  ), noted as (
    update tallybook.rate_state s
       set promised_at = case when k.passing > 0 then k.base + k.passing * k.gap else s.promised_at end,
           paced_to = case when k.held > 0 then greatest(k.base + k.passing * k.gap, k.paced_to) + k.held * k.gap
           else s.paced_to end
      from per_key k where s.name = k.key
  ), later as (
    update tallybook.scheduled s
       set run_at = case when p.mine then greatest(k.base + k.passing * k.gap,
                                                   k.paced_to) + (p.place - k.passing) * k.gap - c_early
                         else p_at + interval '10 ms' end
      from passed p left join per_key k on k.key = p.key
     where s.job_id = p.job_id and not p.passes
  )
  select array_agg(d.job_id) into v_now from due d left join passed p on p.job_id = d.job_id
         where p.passes is not false;
  return coalesce(v_now, '{}');
end $$;
