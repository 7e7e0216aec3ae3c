-- _check_range(what, value, fits, hint): raise TB005 unless the value fits. A null does not, unless fits is true for
-- it.
create or replace function tallybook._check_range(p_what text, p_value text, p_fits boolean, p_hint text)
returns void language sql stable as $$
  select tallybook._refuse(p_fits is not true, format('%s %s is out of range', p_what, coalesce(p_value, 'null')),
                           p_hint)
$$;
