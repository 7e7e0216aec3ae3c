-- _worker_fate(worker, lease, grace, at): lives, suspect (silent: check again later) or dead. Called by rescue, with
-- its settings; its head defines these. Stores in the worker's row since when its silence is known.
create or replace function tallybook._worker_fate(w tallybook.worker, p_lease interval, p_grace interval,
  p_at timestamptz) returns text
language plpgsql as $$
declare
  v_free boolean; v_heard boolean;
  -- A start that lies ahead: the clock has stepped back since, and each note is newer than the start (see _clock_back).
  v_start timestamptz := case when pg_postmaster_start_time() <= p_at then pg_postmaster_start_time()
                              else '-infinity' end;
begin
  -- Silence alone proves nothing: the server itself may have been away. Silent, and still silent a grace after it was
  -- noticed.
  v_free := w.session and tallybook._session_gone(w.id);
  v_heard := w.seen_at >= p_at - p_lease;
  if w.session and v_heard and not v_free or not w.session and w.seen_at >= p_at - p_lease / 2 then
    update tallybook.worker k set gone_at = null  -- its session is there
     where w.session and w.gone_at is not null
       and k.id = (select x.id from tallybook.worker x where x.id = w.id
                   and x.gone_at = w.gone_at for update skip locked);
    return 'lives';
  end if;
  if w.seen_at = '-infinity' then return 'dead'; end if;
  -- Not heard since the server started: nobody could be. Its silence counts from there, and its session proves nothing.
  if w.seen_at < v_start and p_at between v_start and v_start + p_lease then return 'suspect'; end if;
  if w.gone_at is null or w.gone_at < v_start then  -- a note from before an outage proves nothing
    update tallybook.worker k set gone_at = p_at
     where k.id = (select x.id from tallybook.worker x where x.id = w.id and x.seen_at = w.seen_at
                   and x.gone_at is not distinct from w.gone_at for update skip locked);
    return 'suspect';
  end if;
  if w.gone_at > p_at - (case when w.session and v_heard then p_grace
                              when w.gone_at - w.seen_at > 2 * p_lease and not v_free then greatest(p_grace, p_lease)
                              else greatest(p_grace, p_lease / 3) end)
     or not w.session and v_heard then
    return 'suspect';
  end if;
  return 'dead';
end $$;
