-- _atomic(): whether this is the transaction that was opened for an atomic task, and not one that its handler has
-- begun.
--
-- A worker marks the transaction at its beginning with SET LOCAL. The mark ends with the transaction and needs no
-- query, so the handler may still choose the isolation level. Called right before the attempt's end, after which only
-- COMMIT follows:
-- a worker that is stopped or cut off in between may not keep the end open, because a rescuer would wait for it.
-- rights: worker, as the caller
create or replace function tallybook._atomic() returns boolean
language plpgsql volatile as $$
begin
  if current_setting('tallybook.atomic', true) is distinct from 'on' then return false; end if;
  perform set_config('idle_in_transaction_session_timeout', '10s', true);
  return true;
end $$;
