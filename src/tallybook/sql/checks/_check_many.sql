-- _check_many(tasks, args, max_attempts, headers, order_keys, expires_ats, options, run_ats): raise TB005 for the first
-- job that does not fit. A second check behind the library's, as _check_args is for one job. Of task names it checks
-- less than _check_name: invisible characters other than control characters pass.
create or replace function tallybook._check_many(p_tasks text[], p_args text[], p_max_attempts int[],
  p_headers text[], p_order_keys text[], p_expires_ats timestamptz[], p_options text[], p_run_ats timestamptz[])
returns void language plpgsql immutable as $$
declare v_bad int;
begin
  select f.n into v_bad
    from unnest(p_tasks, p_args, p_max_attempts, p_headers) with ordinality as f(task, args, max_attempts, headers, n)
   where f.task is null or f.task ~ E'[[:cntrl:]]|^\\s|\\s$' or f.task = '' or octet_length(f.task) > 200
      or f.args is null or left(f.args, 1) <> '{' or octet_length(f.args) > 1000000
      or f.max_attempts not between 1 and 32767 or octet_length(f.headers) > 8000
      or left(f.headers, 1) <> '{' limit 1;
  if found then
    raise exception 'job % of the batch does not fit', v_bad using errcode = 'TB005',
      hint = 'A task name has 1 to 200 bytes; args are one JSON object of at most 1,000,000 bytes; headers have at '
             'most 8,000.';
  end if;
  if p_headers is not null then
    perform tallybook._check_links(h::jsonb -> 'links') from unnest(p_headers) h where h like '%"links"%'
            and h::jsonb ? 'links';
  end if;
  if p_order_keys is not null or p_expires_ats is not null or p_options is not null then
    -- Most jobs of a batch have the same options, and a check takes 4 us.
    perform tallybook._check_options(f.k, f.x, f.o::jsonb)
       from (select distinct * from unnest(p_order_keys, p_expires_ats, p_options)) f(k, x, o);
  end if;
  if p_run_ats is not null then
    perform tallybook._check_options(null, null, null, r) from unnest(p_run_ats) r where not isfinite(r);
  end if;
end $$;
