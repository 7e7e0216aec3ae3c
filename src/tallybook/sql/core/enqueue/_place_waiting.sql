-- _place_waiting(waiting, at): move a job that waited to its lane (true), or to scheduled if it was given a later time
-- (false). The caller has deleted its row. It does not wait for a permit any more (held).
create or replace function tallybook._place_waiting(w tallybook.waiting, p_at timestamptz default clock_timestamp())
returns boolean language plpgsql as $$
begin
  perform tallybook._place(tallybook._entry_of(to_jsonb(w) #- '{options,held}'), w.run_at, p_at);
  return coalesce(w.run_at <= p_at, true);
end $$;
