-- _check_options(order_key, expires_at, options, run_at): raise TB005 for options that no job may carry.
-- Of options it checks limits, fair_key and version, and refuses subject, parents, and what Tallybook notes about a
-- wait for a limit (turn, held, permits); all other keys pass unchecked, also followed, which fan_out passes.
-- rights: worker, as the caller
create or replace function tallybook._check_options(p_order_key text, p_expires_at timestamptz,
  p_options jsonb, p_run_at timestamptz default null) returns void
language plpgsql immutable as $$
begin
  perform tallybook._refuse(octet_length(p_order_key) not between 1 and 512,
                            format('an order key has 1 to 512 bytes, this one has %s', octet_length(p_order_key))),
          tallybook._refuse(not isfinite(p_run_at), 'run_at is ' || p_run_at,
                            'Give a time. Leave it out for a job that runs at once.'),
          tallybook._refuse(p_expires_at = '-infinity', 'expires_at is minus infinity',
                            'Leave it out for a job that does not expire.'),
          tallybook._refuse(jsonb_typeof(p_options) <> 'object' or octet_length(p_options::text) > 8000,
                            'options are one JSON object of at most 8,000 bytes'),
          tallybook._refuse(p_options ? 'subject', 'options have no subject', 'Use subject_push.'),
          tallybook._refuse(p_options ? 'parents', 'options have no parents', 'Use enqueue_after.'),
          tallybook._refuse(p_options ?| '{turn,held,permits}', 'options have no turn, held or permits',
                            'Tallybook sets them for a job that waits for a limit: choose another name.'),
          tallybook._refuse(jsonb_typeof(p_options -> 'version') <> 'number'
                            or p_options ->> 'version' !~ '^[1-9][0-9]{0,2}$',
            format('version %s is not a whole number from 1 to 999', left(p_options ->> 'version', 40)),
            'It is the version of the task''s args that these are; leave it out for the first.');
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
    perform tallybook._refuse(
              jsonb_typeof(p_options -> 'fair_key') <> 'string'
              or octet_length(p_options ->> 'fair_key') not between 1 and 200,
              'a fair key is a text of 1 to 200 bytes, not ' || coalesce(left(p_options ->> 'fair_key', 200), 'null')),
            tallybook._check_name('fair key', p_options ->> 'fair_key', 200),
            tallybook._refuse(p_order_key is not null, 'a job has an order key or a fair key',
              'The order within a fair key is that in which its jobs came; one at a time is a concurrency limit of 1.');
  end if;
end $$;
