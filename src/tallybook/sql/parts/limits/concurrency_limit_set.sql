-- concurrency_limit_set(name, most): at most so many jobs run at once, over all workers. Names as in rate_limit_set.
--
--   in_code  the app whose code declares it; a person's rule of that name stays as it is then
-- Returns created, changed or unchanged. A lower one stops nobody who runs. Errors: TB005. Writes concurrency_limit.
-- rights: operator
create or replace function tallybook.concurrency_limit_set(name text, most int, in_code text default null,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  v_there tallybook.concurrency_limit;
begin
  perform tallybook._check_limit_name(name);
  if most is null or most not between 1 and 10000 then
    raise exception 'most % is out of range', coalesce(most::text, 'null') using errcode = 'TB005',
      hint = 'It goes from 1 to 10000.';
  end if;
  loop
    select r.* into v_there from tallybook.concurrency_limit r where r.name = concurrency_limit_set.name for update;
    if found then
      if in_code is not null and v_there.in_code is null or (v_there.most, v_there.in_code) is not distinct
         from (most, in_code) then
        return 'unchanged';
      end if;
      update tallybook.concurrency_limit r set most = concurrency_limit_set.most,
        in_code = concurrency_limit_set.in_code,
             changed_at = concurrency_limit_set.at
       where r.name = concurrency_limit_set.name;
      perform tallybook._wake(' concurrency_release');
      return 'changed';
    end if;
    insert into tallybook.concurrency_limit (name, most, in_code, created_at, changed_at)
    values (concurrency_limit_set.name, most, in_code, at, at) on conflict do nothing;
    if found then return 'created'; end if;
  end loop;
end $$;

-- _check_limit_name(name): raises TB005 unless a rule may have this name.
create or replace function tallybook._check_limit_name(p_name text) returns void
language plpgsql immutable as $$
begin
  perform tallybook._check_name('name of a limit', p_name, 200);
  if p_name in ('queue', 'task', 'queue:', 'task:') then
    raise exception 'a limit cannot be named %', p_name using errcode = 'TB005',
      hint = 'Write queue:NAME or task:NAME.';
  end if;
end $$;
