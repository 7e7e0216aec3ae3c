-- _next_attempt(entry, run_at, at, fair): where a job goes whose last attempt has ended: behind all that is in its lane
-- now, with the failures, crashes and errors that the row says. For fair see _place: true for who has had its turn.
create or replace function tallybook._next_attempt(e tallybook.entry, p_run_at timestamptz, p_at timestamptz,
  p_fair boolean default false) returns void
language plpgsql as $$
begin
  e.attempt := e.attempt + 1; e.seq := null; e.run_at := p_at;
  perform tallybook._place(e, p_run_at, p_at, null, p_fair);
end $$;
