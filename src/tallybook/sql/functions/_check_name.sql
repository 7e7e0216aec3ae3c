-- _check_name(what, name, max_bytes): raises TB005 unless the name is one that people can type, see and index.
create or replace function tallybook._check_name(p_what text, p_name text, p_max int) returns void
language plpgsql immutable as $$
begin
  if p_name is null or p_name = '' or octet_length(p_name) > p_max then
    raise exception 'a % has 1 to % bytes, this one has %', p_what, p_max, coalesce(octet_length(p_name), 0)
      using errcode = 'TB005';
  end if;
  if p_name ~ '[[:cntrl:]]' or p_name ~ '^\s|\s$' then
    raise exception 'a % has no control characters and no space at its ends: %', p_what, to_json(p_name)
      using errcode = 'TB005';
  end if;
end $$;
