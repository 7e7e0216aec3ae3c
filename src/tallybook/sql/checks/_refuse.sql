-- _refuse(wrong, message, hint, code): raise an error with this message if wrong is true; the code is TB005 by default.
-- Not immutable: with constants it would raise when the statement is planned.
-- rights: worker, as the caller
create or replace function tallybook._refuse(p_wrong boolean, p_message text, p_hint text default null,
  p_code text default 'TB005') returns void
language plpgsql stable as $$
begin
  if p_wrong is not true then return; end if;
  if p_hint is null then raise exception using message = p_message, errcode = p_code; end if;
  raise exception using message = p_message, errcode = p_code, hint = p_hint;
end $$;

-- _read_committed(message, hint): raise TB003 at another isolation level; %s in the message is replaced by its name.
-- rights: worker, as the caller
create or replace function tallybook._read_committed(p_message text, p_hint text default null) returns void
language plpgsql stable as $$
declare v_level text := current_setting('transaction_isolation');
begin
  if v_level <> 'read committed' then
    perform tallybook._refuse(true, format(p_message, upper(v_level)), p_hint, 'TB003');
  end if;
end $$;
