-- _lost(entry, error, at, max_crashes, alone, delay): continue a job whose attempt crashed its process or was lost with
-- its worker: back to its lane with one more crash, or a dead letter with the reason crashed. Returns available,
-- scheduled or dead.
--
-- A job becomes a dead letter only for attempts that ran alone. If several were lost together, nobody knows which of
-- them was the cause, and a worker that only the network hides may live (see _rescue_attempts). A worker therefore runs
-- a job that is one crash from its limit while nothing else runs (see suspects.py). At three times the limit the job is
-- dead in any case, for workers that always run such jobs side by side.
create or replace function tallybook._lost(e tallybook.entry, p_error jsonb, p_at timestamptz, p_max_crashes int,
  p_alone boolean, p_delay interval) returns text
language plpgsql as $$
begin
  e.crashes := e.crashes + 1;
  e.errors := tallybook._errors(e.errors, p_error);
  if e.crashes >= p_max_crashes and (p_alone or e.crashes >= 3 * p_max_crashes) then
    perform tallybook._make_dead(e, 'crashed', p_at);
    return 'dead';
  end if;
  e.options := e.options - 'permits';  -- as in _next_attempt
  perform tallybook._next_attempt(e, p_at + p_delay, p_at);
  return case when p_delay > interval '0' then 'scheduled' else 'available' end;
end $$;
