-- _check_name(what, name, max_bytes): raise TB005 unless people can type and see the name and it fits an index.
-- rights: worker, as the caller
create or replace function tallybook._check_name(p_what text, p_name text, p_max int) returns void
language plpgsql immutable as $$
begin
  if p_name is null or p_name = '' or octet_length(p_name) > p_max then
    raise exception 'a % has 1 to % bytes, this one has %', p_what, p_max, coalesce(octet_length(p_name), 0)
      using errcode = 'TB005';
  end if;
  if not tallybook._is_visible(p_name) then
    raise exception 'a % has no control or invisible characters and no space at its ends: %', p_what,
      (select string_agg(case when c = ' ' or tallybook._is_visible(c) then c
                         else format('<U+%s>', upper(to_hex(ascii(c)))) end, '')
         from regexp_split_to_table(to_json(p_name)::text, '') c)
      using errcode = 'TB005';
  end if;
end $$;

-- _is_visible(name): whether it has no control or invisible characters, and no space at its ends.
-- Compares code points, because classes of a regular expression depend on the server's locale. `_model/options.py` has
-- the same list.
-- rights: worker, as the caller
create or replace function tallybook._is_visible(p_name text) returns boolean
language sql immutable as $$
  select p_name collate "C" !~ ('[\u0001-\u001f\u007f-\u009f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f'
    '\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164'
    '\ufeff\uffa0\ufff0-\ufffb'
    '\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]'
    '|^[\u0020\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|[\u0020\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]$')
$$;
