-- _amended(entry, at): the entry with its changed args and lane, for its next attempt.
--
-- A later time stays stored, because a worker that stops or dies between the claim and the start must not make the job
-- run before it. The rest has been used up, unless a producer is changing it right now: that change is for the next
-- attempt.
-- profile: lookup
create or replace function tallybook._amended(e tallybook.entry,
  p_at timestamptz default clock_timestamp()) returns tallybook.entry language plpgsql as $$
declare a tallybook.amendment; v_free boolean; l record;
begin
  if e.unique_key is null then return e; end if;  -- only those are amended
  -- Locked before it is read, so that nothing is thrown away that was committed after the reading.
  select x.* into a from tallybook.amendment x where x.job_id = e.job_id for update skip locked;
  v_free := found;
  if not v_free then
    select x.* into a from tallybook.amendment x where x.job_id = e.job_id;
    if not found then return e; end if;
  end if;
  if a.args is not null then
    e.args := a.args;
    e.options := tallybook._versioned(e.options, a.version);
  end if;
  if a.priority is not null then
    select n.queue, n.part, n.priority into l from tallybook.lane n where n.lane_id = e.lane_id;
    if a.priority < l.priority then
      select n.lane_id, n.retention into e.lane_id, e.retention from tallybook._lane(l.queue, a.priority, l.part) n;
    end if;
  end if;
  if v_free and a.run_at > p_at then
    update tallybook.amendment x set args = null, version = null, priority = null where x.job_id = e.job_id;
  elsif v_free then
    delete from tallybook.amendment x where x.job_id = e.job_id;
  end if;
  return e;
end $$;
