-- _check_args(args, headers): raises TB005 for args or headers that no entry may carry: the wall behind the library's own.
--
-- The cheap look at the binary size decides for almost all; only what is near the limit is measured as text, which has
-- spaces that the library's own text has not: hence the slack.
create or replace function tallybook._check_args(p_args jsonb, p_headers jsonb) returns void
language plpgsql immutable as $$
begin
  if p_args is null or jsonb_typeof(p_args) <> 'object' then
    raise exception 'args are one JSON object, not %', coalesce(jsonb_typeof(p_args), 'null')
      using errcode = 'TB005', hint = 'Name the values: {"user_id": 42}.';
  end if;
  if pg_column_size(p_args) > 500000 and octet_length(p_args::text) > 1200000 then
    raise exception 'args have % bytes', octet_length(p_args::text)
      using errcode = 'TB005', hint = 'At most 1,000,000 bytes fit; store what is larger elsewhere and pass its key.';
  end if;
  if p_headers is not null and (jsonb_typeof(p_headers) <> 'object' or octet_length(p_headers::text) > 8000) then
    raise exception 'headers are one JSON object of at most 8,000 bytes' using errcode = 'TB005';
  end if;
end $$;
