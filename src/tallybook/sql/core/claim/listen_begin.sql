-- listen_begin(queues, held): register this session as a sleeper on these queues.
--
-- A worker runs it on its listening session before it waits. held: it is registered already, and only checks whether
-- `clear` is true now.
--   armed  the session is registered. False: a producer was checking for sleepers at this moment; nothing has happened,
--          so try again.
--   clear  no notification can be missed. False: an open transaction checked for sleepers before this one was
--          registered, and will not wake it when it commits. Look for jobs, and call again in 5 to 50 ms, until it is
--          true.
-- Queue names are the channel's payloads; ' promote' is the name for sessions that wait for scheduled jobs.
-- rights: worker
create or replace function tallybook.listen_begin(queues text[], held boolean default false, out armed boolean,
  out clear boolean)
language plpgsql as $$
declare v_key int; v_got int[] := '{}';
begin
  armed := true; clear := false;
  if not held then
    for v_key in select distinct hashtext(q) from unnest(queues) q loop
      if pg_try_advisory_lock_shared(1413565444, v_key) then v_got := v_got || v_key; else armed := false; end if;
    end loop;
    if not armed then
      perform pg_advisory_unlock_shared(1413565444, k) from unnest(v_got) k;  -- they are counted
      return;
    end if;
  end if;
  clear := (select coalesce(bool_and(pg_try_advisory_lock(1413565445, k) and pg_advisory_unlock(1413565445, k)), true)
              from (select distinct hashtext(q) & 127 from unnest(queues) q) d(k));
end $$;
