-- _check_args(args, headers): raise TB005 for args or headers that no entry may carry. A second check behind the
-- library's.
--
-- The quick check of the binary size is enough for almost all. Only sizes near the limit, and compressed values of a
-- table, are measured as text, which has spaces that the library's text does not have; hence the slack.
-- rights: worker, as the caller
create or replace function tallybook._check_args(p_args jsonb, p_headers jsonb) returns void
language plpgsql immutable as $$
begin
  if p_args is null or jsonb_typeof(p_args) <> 'object' then
    raise exception 'args are one JSON object, not %', coalesce(jsonb_typeof(p_args), 'null')
      using errcode = 'TB005', hint = 'Name the values: {"user_id": 42}.';
  end if;
  if (pg_column_size(p_args) > 500000 or pg_column_compression(p_args) is not null)
    and octet_length(p_args::text) > 1200000 then
    raise exception 'args have % bytes', octet_length(p_args::text)
      using errcode = 'TB005', hint = 'At most 1,000,000 bytes fit; store what is larger elsewhere and pass its key.';
  end if;
  if p_headers is not null and (jsonb_typeof(p_headers) <> 'object' or octet_length(p_headers::text) > 8000) then
    raise exception 'headers are one JSON object of at most 8,000 bytes' using errcode = 'TB005';
  end if;
  if p_headers ? 'links' then perform tallybook._check_links(p_headers -> 'links'); end if;
end $$;

-- _check_links(links): raise TB005 unless these are links: the rows of yours that a job belongs to, {"submission": 42}.
-- rights: worker, as the caller
create or replace function tallybook._check_links(p_links jsonb) returns void language plpgsql immutable as $$
declare l record;
begin
  if jsonb_typeof(p_links) is distinct from 'object' or p_links = '{}' then
    raise exception 'links are one JSON object of a kind and a key each, not %',
      left(coalesce(p_links::text, 'null'), 100)
      using errcode = 'TB005', hint = 'Write {"links": {"submission": 42}}.';
  end if;
  if (select count(*) from jsonb_object_keys(p_links)) > 10 then
    raise exception 'a job has at most 10 links, not %', (select count(*) from jsonb_object_keys(p_links))
      using errcode = 'TB005';
  end if;
  for l in select e.key, e.value, e.value #>> '{}' as text from jsonb_each(p_links) e loop
    if l.key !~ '^[a-z0-9_]{1,50}$' then
      raise exception 'a link''s kind has 1 to 50 of a to z, 0 to 9 and _, not %', to_json(left(l.key, 100))
        using errcode = 'TB005', hint = 'It is the name of a table or of a thing, like submission.';
    end if;
    if not coalesce(case jsonb_typeof(l.value) when 'string' then octet_length(l.text) between 1 and 200
                                               when 'number' then l.text ~ '^-?[0-9]{1,18}$' end, false) then
      raise exception 'the key of the link % is a text of 1 to 200 bytes or a whole number, not %', l.key,
        left(l.value::text, 100)
        using errcode = 'TB005';
    end if;
  end loop;
end $$;
