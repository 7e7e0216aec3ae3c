-- _check_range(what, value, fits, hint): raises TB005 unless the value fits. A null does not, unless fits says so.
create or replace function tallybook._check_range(p_what text, p_value text, p_fits boolean, p_hint text)
returns void language plpgsql immutable as $$
begin
  if p_fits is not true then
    raise exception '% % is out of range', p_what, coalesce(p_value, 'null') using errcode = 'TB005', hint = p_hint;
  end if;
end $$;
