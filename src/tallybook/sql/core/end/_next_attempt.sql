-- _next_attempt(entry, run_at, at, fair): place the next attempt of a job, behind all entries of its lane, with the
-- failures, crashes and errors of the row. fair: see _place; true for a job that has had its turn among the fair keys.
-- It no longer counts as waiting for its turn at its limits: it has had that, or is given another time. With fair, the
-- attempt has run: the next one may ask for other limits (permits).
create or replace function tallybook._next_attempt(e tallybook.entry, p_run_at timestamptz, p_at timestamptz,
  p_fair boolean default false) returns void
language plpgsql as $$
begin
  e.attempt := e.attempt + 1; e.seq := null; e.run_at := p_at;
  if p_fair or p_run_at > p_at then e.options := tallybook._turn_over(e.options); end if;
  if p_fair then e.options := e.options - 'permits'; end if;
  perform tallybook._place(e, p_run_at, p_at, null, p_fair);
end $$;

-- _turn_over(options): the options of a job that does not wait for its turn at a limit any more. When it comes back, it
-- still goes before new jobs (an empty turn), or with a fair key waits for its turn there.
create or replace function tallybook._turn_over(p_options jsonb) returns jsonb language sql immutable as $$
  select case when not p_options ? 'turn' then p_options when p_options ? 'fair_key' then p_options - 'turn'
         else p_options || '{"turn": ""}' end
$$;
