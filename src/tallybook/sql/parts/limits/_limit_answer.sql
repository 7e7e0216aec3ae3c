-- _limit_answer(job, keys, of, from, soon, keeps, missed, at): decide for one job that asks for a start.
--
--   of     its own keys among the keys       from, soon   the first and the last moment that counts as a start for this
--          question
--   keeps  it may have permits: reserved for it, or from its last question
--   missed it had a turn and did not start in time
-- blocked_by: it must wait for a permit of this key. passes: it starts at start_at, with its permits (kept); was: at
-- another time than before, which was counted. Neither: its turn comes at start_at, behind others of a key.
-- Reads concurrency_holder; for a missed turn rate_call, whose row it changes.
-- profile: nested
create or replace function tallybook._limit_answer(p_job tallybook._limited_job, p_keys tallybook._limit_key[],
  p_of int[], p_from timestamptz, p_soon timestamptz, p_keeps boolean, p_missed boolean, p_at timestamptz,
  out blocked_by text, out passes boolean, out start_at timestamptz, out was timestamptz, out behind text,
  out kept text[])
language plpgsql
set enable_memoize = off  -- each row is looked up once: there is nothing to remember
as $$
declare k tallybook._limit_key; v_probe text[] := '{}'; v_names text[]; j int;
begin
  start_at := p_from; passes := true; kept := '{}';
  if p_missed or p_keeps then v_names := array(select p_keys[i].name from unnest(p_of) i); end if;
  if p_missed then
    was := (select max(c.called_at) from tallybook.rate_call c
             where c.name = (select p_keys[i].name from unnest(p_of) i where p_keys[i].gap is not null limit 1)
               -- else the clock has stepped back since
               and c.called_at > p_at - interval '1 s' and c.called_at <= p_soon
               and c.job_id = p_job.job_id and c.attempt = p_job.attempt);
    -- Only while nearly all that counts with it is still to come: see "Any window" in
    -- https://github.com/tallybook/tallybook/blob/main/docs/design/0006-outside.md.
    if was > p_at - interval '500 ms' then
      start_at := greatest(start_at, was);
      kept := v_names;
      update tallybook.rate_call c set called_at = start_at
       where c.name = any (v_names) and c.called_at = was and c.job_id = p_job.job_id and c.attempt = p_job.attempt;
      return;
    end if;
    was := null;
  end if;
  if p_keeps then
    select coalesce(array_agg(h.name), '{}'), coalesce(array_agg(h.name) filter (where h.probe), '{}') into kept,
           v_probe
      from tallybook.concurrency_holder h where h.name = any (v_names) and h.xid = p_job.xid and h.seq = p_job.seq;
  end if;
  foreach j in array p_of loop
    k := p_keys[j];
    if blocked_by is null and k.free is not null
       and (case when k.name = any (kept) then k.barred and k.name <> all (v_probe) else k.free <= 0 or k.has_line end)
           then
      blocked_by := k.name;
    end if;
    continue when k.gap is null;
    if k.next_at > start_at then start_at := k.next_at; behind := k.name; end if;
    if not p_job.front and k.tail_at > p_soon then passes := false; behind := coalesce(behind, k.name); end if;
  end loop;
  passes := passes and start_at <= p_soon;
  if passes or blocked_by is not null then return; end if;
  foreach j in array p_of loop  -- behind the waiting jobs, at each of its limits
    k := p_keys[j];
    continue when k.gap is null;
    start_at := greatest(start_at, k.front_at, case when not p_job.front then k.tail_at end);
  end loop;
end $$;
