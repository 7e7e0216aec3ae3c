-- _atomic(): whether this is the transaction that was opened for an atomic task, and not one that its handler has
-- begun.
--
-- A worker marks the transaction as it begins, with SET LOCAL: the mark ends with the transaction, and no query is
-- needed for it, so that the handler may still choose the isolation level. Said before the attempt's end: all that is
-- left to come is
-- COMMIT, so a worker that is stopped or cut off in between may not hold the end open, which a rescuer would wait for.
-- rights: worker, as the caller
create or replace function tallybook._atomic() returns boolean
language plpgsql volatile as $$
begin
  if current_setting('tallybook.atomic', true) is distinct from 'on' then return false; end if;
  perform set_config('idle_in_transaction_session_timeout', '10s', true);
  return true;
end $$;
