-- listen_end(queues): say that this session sleeps no more; producers of these queues send no notification for it.
-- rights: worker
create or replace function tallybook.listen_end(queues text[]) returns void
language sql as $$
  select pg_advisory_unlock_shared(1413565444, k) from (select distinct hashtext(q) from unnest(queues) q) d(k)
$$;
