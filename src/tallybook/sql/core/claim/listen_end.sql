-- listen_end(queues): unregister this session as a sleeper; producers of these queues send it no more notifications.
-- rights: worker
create or replace function tallybook.listen_end(queues text[]) returns void
language sql as $$
  select pg_advisory_unlock_shared(1413565444, k) from (select distinct hashtext(q) from unnest(queues) q) d(k)
$$;
