-- _next_attempt(entry, run_at, at, fair): place the next attempt of a job, behind all entries of its lane, with the
-- failures, crashes and errors of the row. fair: see _place; true for a job that has had its turn among the fair keys.
-- It has had its turn at its limits, too: it no longer counts as waiting for it. When it comes back, it still goes
-- before new jobs (an empty turn), or with a fair key waits for its turn there.
create or replace function tallybook._next_attempt(e tallybook.entry, p_run_at timestamptz, p_at timestamptz,
  p_fair boolean default false) returns void
language plpgsql as $$
begin
  e.attempt := e.attempt + 1; e.seq := null; e.run_at := p_at;
  if p_fair and e.options ? 'turn' then
    e.options := case when e.options ? 'fair_key' then e.options - 'turn' else e.options || '{"turn": ""}' end;
  end if;
  perform tallybook._place(e, p_run_at, p_at, null, p_fair);
end $$;
