-- _clock_forward(by, at): record that the server's clock has stepped forward by this much. Workers notice it.
--
-- Several workers notice one step; it is recorded once. Nothing needs repair: due jobs run, a schedule treats its
-- missed ticks as its option sets, and a worker that sends heartbeats keeps its jobs (see rescue).
-- Writes clock_step.
-- rights: worker
create or replace function tallybook._clock_forward(p_by interval, p_at timestamptz default clock_timestamp())
returns void language sql as $$
  insert into tallybook.clock_step (noticed_at, by)
  select p_at, p_by
   where pg_try_advisory_xact_lock(1413565449, hashtext('clock: one at a time'))
     and not exists (select from tallybook.clock_step c where c.by > '0' and c.noticed_at > p_at - interval '1 min')
$$;
