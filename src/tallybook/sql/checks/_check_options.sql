-- _check_options(order_key, expires_at, options, run_at): raise TB005 for options that no job may carry.
-- rights: worker, as the caller
create or replace function tallybook._check_options(p_order_key text, p_expires_at timestamptz,
  p_options jsonb, p_run_at timestamptz default null) returns void
language plpgsql immutable as $$
declare
  v_done boolean;
begin
  if p_order_key is not null and octet_length(p_order_key) not between 1 and 512 then
    raise exception 'an order key has 1 to 512 bytes, this one has %', octet_length(p_order_key)
      using errcode = 'TB005';
  end if;
  if not isfinite(p_run_at) then
    raise exception 'run_at is %', p_run_at using errcode = 'TB005',
      hint = 'Give a time. Leave it out for a job that runs at once.';
  end if;
  if p_expires_at = '-infinity' then
    raise exception 'expires_at is minus infinity' using errcode = 'TB005',
      hint = 'Leave it out for a job that does not expire.';
  end if;
  if p_options is not null and (jsonb_typeof(p_options) <> 'object' or octet_length(p_options::text) > 8000) then
    raise exception 'options are one JSON object of at most 8,000 bytes' using errcode = 'TB005';
  end if;
  if p_options ? 'subject' then
    raise exception 'options have no subject' using errcode = 'TB005', hint = 'Use subject_push.';
  end if;
  if p_options ? 'parents' then
    raise exception 'options have no parents' using errcode = 'TB005', hint = 'Use enqueue_after.';
  end if;
  if p_options ? 'version'
     and not (jsonb_typeof(p_options -> 'version') = 'number' and p_options ->> 'version' ~ '^[1-9][0-9]{0,2}$') then
    raise exception 'version % is not a whole number from 1 to 999', left(p_options ->> 'version', 40)
      using errcode = 'TB005', hint =
      'It is the version of the task''s args that these are; leave it out for the first.';
  end if;
  if p_options ? 'limits' and (
       jsonb_typeof(p_options -> 'limits') <> 'array' or jsonb_array_length(p_options -> 'limits') not between 1 and 8
       or exists (select from jsonb_array_elements(p_options -> 'limits') x
                   where jsonb_typeof(x) <> 'string' or octet_length(x #>> '{}') not between 1 and 200)) then
    raise exception 'limits are a list of 1 to 8 names of 1 to 200 bytes, not %', left(p_options ->> 'limits', 200)
      using errcode = 'TB005';
  end if;
  if p_options ? 'limits' then
    perform tallybook._check_name('name of a limit', x, 200) from jsonb_array_elements_text(p_options -> 'limits') x;
  end if;
  if p_options ? 'fair_key' then
    if jsonb_typeof(p_options -> 'fair_key') <> 'string' or octet_length(p_options ->> 'fair_key') not between 1 and 200
       then
      raise exception 'a fair key is a text of 1 to 200 bytes, not %', left(p_options ->> 'fair_key', 200)
        using errcode = 'TB005';
    end if;
    v_done := tallybook._check_name('fair key', p_options ->> 'fair_key', 200) is null;
    if p_order_key is not null then
      raise exception 'a job has an order key or a fair key' using errcode = 'TB005',
        hint = 'The order within a fair key is that in which its jobs came; one at a time is a concurrency limit of 1.';
    end if;
  end if;
end $$;
