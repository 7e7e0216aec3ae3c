-- _permits_free(name, at): how many more jobs of this key may start (null: it has no such rule), whether the next one
-- is a probe, and whether the breaker stops all others, even those with a permit.
--
-- An attempt without an outcome holds a permit. Forgets attempts that have ended, after counting them for the breaker:
-- it opens, closes and starts its probe at the next question for a start. One that expired before its start is not
-- counted. The caller has locked the key's row in rate_state.
-- Reads limit_rule, outcome; deletes from concurrency_holder; writes breaker_state.
-- profile: nested
create or replace function tallybook._permits_free(p_name text, p_at timestamptz, out free int, out probing boolean,
  out barred boolean)
language plpgsql
set enable_memoize = off  -- each row is looked up once: there is nothing to remember
as $$
declare
  c_any constant int := 2147483647;
  v_most int; v_breaker tallybook.limit_rule; v tallybook.breaker_state; v_was tallybook.breaker_state;
  v_gone tid[]; v_failed timestamptz[]; v_proved boolean; v_disproved timestamptz; v_held int; v_probes int;
begin
  probing := false; barred := false;
  select r.most into v_most from tallybook._limit_of('concurrency', p_name) r;
  select b.* into v_breaker from tallybook._limit_of('breaker', p_name) b;
  if v_most is null and v_breaker.name is null then return; end if;
  select array_agg(h.ctid), array_agg(o.ended_at) filter (where f.failed and not h.probe),
         bool_or(h.probe and o.state = 'completed'), max(o.ended_at) filter (where f.failed and h.probe)
    into v_gone, v_failed, v_proved, v_disproved
    from tallybook.concurrency_holder h, lateral tallybook._outcome_of(h.retention, h.xid, h.seq) o,
         lateral (select o.state in ('failed', 'dead') and (o.error ? 'started_at'
                         or o.error ->> 'type' is distinct from 'Expired') as failed) f
   where h.name = p_name;
  if v_gone is not null then delete from tallybook.concurrency_holder h where h.ctid = any (v_gone); end if;
  select count(*), count(*) filter (where h.probe) into v_held, v_probes from tallybook.concurrency_holder h
         where h.name = p_name;
  free := coalesce(v_most, c_any) - v_held;
  if v_breaker.name is null then return; end if;

  select s.* into v_was from tallybook.breaker_state s where s.name = p_name;
  v := v_was;
  if v.name is null then v.name := p_name; v.state := 'closed'; v.failed_at := '{}'; v.changed_at := p_at; end if;
  if v_failed is not null and v.state = 'closed' then
    v.failed_at := array(select x from unnest(v.failed_at || v_failed) x order by x desc limit v_breaker.most);
    v.failed_at := array(select x from unnest(v.failed_at) x where x > v.failed_at[1] - v_breaker.per order by x desc);
    if cardinality(v.failed_at) >= v_breaker.most
       then v.state := 'open'; v.open_until := p_at + v_breaker.open_for; end if;
  end if;
  if v_disproved is not null and v.state = 'half-open' then
    v.state := 'open'; v.open_until := p_at + v_breaker.open_for; v.failed_at := array[v_disproved];
  elsif v_proved and v.state = 'half-open' then
    v.state := 'closed'; v.failed_at := '{}'; v.open_until := null;
  end if;
  if v.state = 'open' and v.open_until <= p_at then v.state := 'half-open'; end if;
  if v.state is distinct from v_was.state then v.changed_at := p_at; end if;
  if v is distinct from v_was then
    insert into tallybook.breaker_state values (v.*)
    on conflict (name) do update set state = excluded.state, failed_at = excluded.failed_at,
       changed_at = excluded.changed_at, open_until = excluded.open_until;
  end if;
  probing := v.state = 'half-open'; barred := v.state <> 'closed';
  free := case v.state when 'open' then 0 when 'half-open' then least(free, 1 - v_probes) else free end;
end $$;
