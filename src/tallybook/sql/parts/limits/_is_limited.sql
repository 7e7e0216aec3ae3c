-- _is_limited(queue, task, options, xid, seq): whether this entry must ask limits before its start.
--
-- False if no limit applies, or if the entry came into line with all its permits: a job that waited for permits has
-- them, and rates and breakers are checked at the start only. Reads the rules; for jobs that waited concurrency_holder.
-- profile: nested
create or replace function tallybook._is_limited(p_queue text, p_task text, p_options jsonb, p_xid xid8, p_seq bigint)
returns boolean language plpgsql stable as $$
declare v_limits jsonb := coalesce(p_options -> 'limits', '[]') || tallybook._wide_limits(p_queue, p_task);
begin
  if v_limits = '[]' then return false; end if;
  if not coalesce(p_options ? 'turn', false) then return true; end if;
  return exists (select from jsonb_array_elements_text(v_limits) n
                  where not exists (select from tallybook.concurrency_holder h
                                     where h.name = n and h.xid = p_xid and h.seq = p_seq)
                     or exists (select from tallybook._limit_of('rate', n))
                     or exists (select from tallybook._limit_of('breaker', n)));
end $$;
