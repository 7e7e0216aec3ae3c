-- _wide_limits(queue, task): the names of the rules for all jobs of a queue and of a task, as a JSON array.
create or replace function tallybook._wide_limits(p_queue text, p_task text) returns jsonb
language plpgsql stable as $$
begin
  return coalesce((select jsonb_agg(distinct r.name) from (
                     select r.name from tallybook.rate_limit r where r.name in ('queue:' || p_queue, 'task:' || p_task)
                     union all
                     select r.name from tallybook.concurrency_limit r where r.name in ('queue:' || p_queue, 'task:'
                         || p_task)
                     union all
                     select r.name from tallybook.breaker_rule r where r.name in ('queue:' || p_queue, 'task:'
                         || p_task)) r), '[]');
end $$;

-- _rate_limit_of(name): the rule of a key: of its own name, else of what stands before the first colon. No row: none.
create or replace function tallybook._rate_limit_of(p_name text) returns setof tallybook.rate_limit
language plpgsql stable as $$
begin
  return query select r.* from tallybook.rate_limit r where r.name = p_name;
  if not found then return query select r.* from tallybook.rate_limit r
     where r.name = split_part(p_name, ':', 1); end if;
end $$;

-- _step(calls, per, burst): the estimated time between the turns of two that wait. The longer gaps that come now and
-- then are spread over all where they are short beside the time that one comes early: else those far behind come too
-- early by all of them, in vain.
create or replace function tallybook._step(p_calls int, p_per interval, p_burst int) returns interval
language sql immutable as $$
  select p_per / (p_calls - p_burst + 1)
         + case when p_per <= interval '10 s' then greatest(interval '20 ms', p_per / 100) / (p_calls - p_burst + 1)
         else interval '0' end
$$;

-- _has_limits(wide): whether there is a rule of any kind; wide: one for all jobs of a queue or of a task.
create or replace function tallybook._has_limits(p_wide boolean default false) returns boolean
language plpgsql stable as $$
declare
  v_wide text[] := '{queue:%,task:%}';
begin
  return exists (select from tallybook.rate_limit r where not p_wide or r.name like any (v_wide))
         or exists (select from tallybook.concurrency_limit r where not p_wide or r.name like any (v_wide))
         or exists (select from tallybook.breaker_rule r where not p_wide or r.name like any (v_wide));
end $$;
