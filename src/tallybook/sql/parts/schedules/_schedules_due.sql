-- _schedules_look(after, at): in how many seconds the next schedule is due (0: now; null: none is); whether any
-- query-driven one is due, and in how many seconds the next of those is besides; and how often workers look at least.
--
-- Three index look-ups. after: where the last run stopped, so that it does not walk over the index's dead rows while an
-- old snapshot holds back vacuum; every few seconds pass null, for late commits. The look is
-- recorded if no session has run the clock for long. Reads schedule; now and then writes service.
-- profile: hot
-- rights: worker
create or replace function tallybook._schedules_look(p_after timestamptz default null,
  p_at timestamptz default clock_timestamp(), out due_in double precision, out queries_due boolean,
  out queries_in double precision, out every double precision) language plpgsql as $$
declare v_idle boolean;
begin
  select extract(epoch from v.every), coalesce(v.last_run_at < p_at - 2 * v.every, true),
         (select greatest(0, extract(epoch from s.due_at - p_at)) from tallybook.schedule s
           where s.due_at is not null and s.query is null and s.due_at >= coalesce(p_after, '-infinity')
           order by s.due_at limit 1),
         exists (select from tallybook.schedule s
                  where s.due_at is not null and s.query is not null and s.due_at <= p_at),
         (select extract(epoch from s.due_at - p_at) from tallybook.schedule s
           where s.due_at is not null and s.query is not null and s.due_at > p_at order by s.due_at limit 1)
    into _schedules_look.every, v_idle, due_in, queries_due, queries_in
    from (select) one left join tallybook.service v on v.name = 'schedules';
  if v_idle and due_in > 0 is not false then perform tallybook._service_ran('schedules', p_at, 0); end if;
end $$;

-- _schedules_due(max, after, queries, at): what a worker needs to compute the ticks of schedules that are due, oldest
-- first.
--
-- No other session runs the clock until the caller's transaction has ended. If one does, there are no rows, unless a
-- due schedule has waited for a second: that session may be frozen, and planning twice does no harm.
-- upto: everything due by then is in the result. Intervals are in microseconds. queries: those that are
-- query-driven, each of which is fired by a transaction of its own, so nobody claims them as a whole. Reads schedule.
-- profile: hot
-- rights: worker
create or replace function tallybook._schedules_due(p_max int default 250, p_after timestamptz default null,
  p_queries boolean default false, p_at timestamptz default clock_timestamp())
returns table (at timestamptz, upto timestamptz, name text, revision text, cron text, every bigint, tz text,
  jitter bigint, missed text, catch_up int, since timestamptz, tick timestamptz) language plpgsql as $$
declare v_before timestamptz := p_at;
begin
  if not p_queries and not tallybook._service_claim('schedules', p_at) then v_before := p_at - interval '1 s'; end if;
  return query
  select p_at, v_before, s.name, s.revision::text, s.cron, (extract(epoch from s.every) * 1000000)::bigint, s.tz,
         (extract(epoch from s.jitter) * 1000000)::bigint, s.missed, s.catch_up, s.since, s.tick
    from ((select k.* from tallybook.schedule k
            where p_queries and k.due_at is not null and k.query is not null and k.due_at <= v_before
            order by k.due_at limit p_max)
          union all
          (select k.* from tallybook.schedule k
            where not p_queries and k.due_at is not null and k.query is null and k.due_at <= v_before
              and k.due_at >= coalesce(p_after, '-infinity')
            order by k.due_at limit p_max)) s;
end $$;
