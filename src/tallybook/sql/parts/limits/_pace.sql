-- _pace(ids, at): choose the due and locked jobs of scheduled that may come into line now; give the others a later
-- time.
--
-- Jobs that wait for their turn at a rate limit (options.turn) come as fast as they can start. Turns are estimates:
-- after an outage, a push or late starts, all jobs of a key would come too early, be claimed in vain and be written
-- again. Here they get a later time in place. Keys whose jobs are on time are only read. The order is kept, except that
-- jobs of priority 0 and 1 go first. limit_take still checks each job. A key with a lock is looked at again in 10 ms,
-- or shortly before its next start. Reads limit_rule, tombstone, lane; writes rate_state, scheduled.
-- profile: hot
create or replace function tallybook._pace(p_ids bigint[], p_at timestamptz) returns bigint[]
language plpgsql
set enable_mergejoin = off  -- the rows are few
as $$
declare
  c_early constant interval := '120 ms';  -- as in limit_take
  c_soon constant timestamptz := p_at + interval '150 ms';  -- a start this near is granted there
  c_near constant timestamptz := p_at + interval '400 ms';  -- the longest time that it may wait there
  c_late constant timestamptz := p_at - interval '60 ms';
  v_keys text[]; v_now bigint[];
begin
  select array_agg(k.key) into v_keys  -- the keys with a job that is late, or would come too early
    from (select s.options ->> 'turn' as key, min(s.run_at) as run_at, count(*) as jobs
            from unnest(p_ids) d(job_id), tallybook.scheduled s
           where s.job_id = d.job_id and s.options ? 'turn' group by 1) k
    left join tallybook.rate_state r on r.name = k.key
   where k.run_at < c_late or greatest(r.next_at, r.promised_at) > c_near
      or k.jobs > 1 and exists (
           select from tallybook._limit_of('rate', k.key) l
            where greatest(r.next_at, r.promised_at, p_at - (l.burst - 1) * tallybook._step(l.most, l.per, l.burst))
                  + (k.jobs - 1) * tallybook._step(l.most, l.per, l.burst) > c_near);
  if v_keys is null then return p_ids; end if;
  with due as materialized (
    select d.job_id, s.run_at, l.priority < 2 as urgent,
           case when not exists (select from tallybook.tombstone t where t.job_id = d.job_id and t.cancelled)
                then s.options ->> 'turn' end as key
      from unnest(p_ids) d(job_id)
      cross join lateral (select s.run_at, s.options, s.lane_id from tallybook.scheduled s where s.job_id = d.job_id
                          limit 1) s
      join tallybook.lane l on l.lane_id = s.lane_id
  ), keys as materialized (
    select k.key, tallybook._step(r.most, r.per, r.burst) as gap, r.burst, greatest(s.next_at, s.promised_at) as next_at
      from unnest(v_keys) k(key) cross join lateral tallybook._limit_of('rate', k.key) r
      left join tallybook.rate_state s on s.name = k.key
  ), mine as materialized (
    select s.name, s.next_at, s.promised_at, s.paced_to, s.front_at from tallybook.rate_state s
     where s.name = any (array(select k.key from keys k)) order by s.name for update skip locked
  ), placed as materialized (
    select d.job_id, d.key, d.run_at, k.gap, k.next_at, m.name is not null as mine, m.front_at,
           case when exists (select from tallybook.scheduled w where w.options ? 'turn' and w.options ->> 'turn' = d.key
                                and w.run_at > p_at) then m.paced_to end as paced_to,
           greatest(m.next_at, m.promised_at, p_at - (k.burst - 1) * k.gap) as base,
           row_number() over (partition by d.key order by d.urgent desc, d.run_at, d.job_id) - 1 as place
      from due d join keys k on k.key = d.key left join mine m on m.name = d.key
  ), passed as materialized (
    select p.*, p.mine and p.base + p.place * p.gap <= c_soon as passes from placed p
  ), counted as materialized (
    select p.key, p.gap, p.paced_to, p.front_at, count(*) filter (where p.passes) as passing,
           count(*) filter (where not p.passes) as held, min(p.run_at) as due_at,
           min(p.run_at) filter (where not p.passes) as held_at,
           p.base + count(*) filter (where p.passes) * p.gap as next_at
      from passed p where p.mine group by p.key, p.gap, p.base, p.paced_to, p.front_at
  ), per_key as materialized (
    select c.*, greatest(c.next_at, case c.why when 'late' then c.paced_to when 'early' then c.front_at end) as behind
      from (select n.*, case when n.gap > c_soon - p_at and n.held_at + c_early + n.gap > n.next_at then 'next'
                             when n.due_at < c_late then 'late' when n.held > 0 then 'early' end as why
              from counted n) c
  ), noted as (
    update tallybook.rate_state s
       set promised_at = case when k.passing > 0 then k.next_at else s.promised_at end,
           paced_to = case when k.held > 0 and k.why = 'late' then k.behind + k.held * k.gap else s.paced_to end,
           front_at = case when k.why = 'early' then k.behind + k.held * k.gap else s.front_at end
      from per_key k where s.name = k.key
  ), later as (
    update tallybook.scheduled s
       set run_at = case when p.mine then k.behind + (p.place - k.passing) * k.gap - c_early
                         else greatest(p.next_at - c_early, p_at + interval '10 ms') end
      from passed p left join per_key k on k.key = p.key
     where s.job_id = p.job_id and not p.passes
  )
  select array_agg(d.job_id) into v_now from due d left join passed p on p.job_id = d.job_id
         where p.passes is not false;
  return coalesce(v_now, '{}');
end $$;
