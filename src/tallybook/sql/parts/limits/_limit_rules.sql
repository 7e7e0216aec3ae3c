-- _limit_of(kind, name): the rule of a key: that of its own name, else of the name before the first colon. No row:
-- none.
create or replace function tallybook._limit_of(p_kind text, p_name text) returns setof tallybook.limit_rule
language sql stable as $$
  select r.* from tallybook.limit_rule r where r.kind = p_kind and r.name in (p_name, split_part(p_name, ':', 1))
   order by r.name = p_name desc limit 1
$$;

-- _limit_set(kind, name, most, per, burst, open_for, in_code, at, skips): create or change a rule: created, changed
-- or unchanged. skips null: unchanged. A person's rule stays when code declares one of its name. Waiting jobs
-- follow the new rule. Errors: TB005 an invalid name, or a value out of range. Writes limit_rule; see _rate_changed.
create or replace function tallybook._limit_set(p_kind text, p_name text, p_most int, p_per interval, p_burst int,
  p_open_for interval, p_in_code text, p_at timestamptz, p_skips boolean default null)
returns text language plpgsql as $$
declare
  c_time constant text := 'It must be from 1 s to 366 days.';
  v_there tallybook.limit_rule; k record;
begin
  select * into k from (values ('rate', 'calls', 100000), ('concurrency', 'most', 10000), ('breaker', 'failures', 1000))
    x(kind, what, most) where x.kind = p_kind;
  perform tallybook._check_range(k.what, p_most::text, p_most between 1 and k.most,
                                 format('It must be from 1 to %s.', k.most)),
          tallybook._check_range('burst', p_burst::text, p_kind <> 'rate' or p_burst between 1 and p_most,
                                 'It must be from 1 to calls.'),
          tallybook._check_range('per', p_per::text,
            p_kind = 'concurrency' or p_per between interval '1 s' and interval '366 days', c_time),
          tallybook._check_range('open_for', p_open_for::text,
            p_kind <> 'breaker' or p_open_for between interval '1 s' and interval '366 days', c_time),
          tallybook._check_name('name of a limit', p_name, 200),
          tallybook._refuse(p_name in ('queue', 'task', 'queue:', 'task:'),
                            format('a limit cannot be named %s', p_name), 'Write queue:NAME or task:NAME.');
  loop
    insert into tallybook.limit_rule (kind, name, most, per, burst, open_for, in_code, skips, created_at, changed_at)
    values (p_kind, p_name, p_most, p_per, p_burst, p_open_for, p_in_code, coalesce(p_skips, false), p_at, p_at)
    on conflict do nothing;
    if found then return 'created'; end if;
    select r.* into v_there from tallybook.limit_rule r where r.kind = p_kind and r.name = p_name for update;
    exit when found;
  end loop;
  if p_in_code is not null and v_there.in_code is null
     or (v_there.most, v_there.per, v_there.burst, v_there.open_for, v_there.in_code, v_there.skips)
        is not distinct from (p_most, p_per, p_burst, p_open_for, p_in_code, coalesce(p_skips, v_there.skips)) then
    return 'unchanged';
  end if;
  update tallybook.limit_rule r
     set most = p_most, per = p_per, burst = p_burst, open_for = p_open_for, in_code = p_in_code, changed_at = p_at,
         skips = coalesce(p_skips, r.skips)
   where r.kind = p_kind and r.name = p_name;
  if p_kind = 'rate' then perform tallybook._rate_changed(p_name, p_at); end if;
  if p_kind = 'concurrency' then perform tallybook._wake(' concurrency_release'); end if;
  return 'changed';
end $$;

-- _wide_limits(queue, task): the names of the rules for all jobs of a queue and of a task, as a JSON array.
create or replace function tallybook._wide_limits(p_queue text, p_task text) returns jsonb
language plpgsql stable as $$
begin
  return coalesce((select jsonb_agg(distinct r.name) from tallybook.limit_rule r
                    where r.kind in ('rate', 'concurrency', 'breaker')
                      and r.name in ('queue:' || p_queue, 'task:' || p_task)), '[]');
end $$;

-- _step(calls, per, burst): the estimated time between the turns of two waiting jobs. The longer gaps that come now and
-- then are spread over all if they are short beside the time that one comes early; else jobs far behind come too
-- early by all of them.
create or replace function tallybook._step(p_calls int, p_per interval, p_burst int) returns interval
language sql immutable as $$
  select p_per / (p_calls - p_burst + 1)
         + case when p_per <= interval '10 s' then greatest(interval '20 ms', p_per / 100) / (p_calls - p_burst + 1)
         else interval '0' end
$$;

-- _has_limits(wide): whether there is a rule of any kind; wide: one for all jobs of a queue or of a task.
create or replace function tallybook._has_limits(p_wide boolean default false) returns boolean
language plpgsql stable as $$
begin
  return case when p_wide then exists (select from tallybook.limit_rule r
                                        where r.name like 'queue:%' or r.name like 'task:%')
              else exists (select from tallybook.limit_rule) end;
end $$;
