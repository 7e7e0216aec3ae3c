-- _check_committed(verb, hint): raises TB003 unless each statement of this transaction sees what has committed by then.
create or replace function tallybook._check_committed(p_verb text, p_hint text) returns void
language plpgsql stable as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception '% needs READ COMMITTED', p_verb using errcode = 'TB003', hint = p_hint;
  end if;
end $$;
