-- _limits_clock_back(by, at): the clock has stepped back by this time: move turns and breakers that are ahead of it,
-- with their order and gaps. Writes rate_state, breaker_state.
-- profile: nojit
create or replace function tallybook._limits_clock_back(p_by interval, p_at timestamptz) returns void
language plpgsql as $$
begin
  perform from (select s.name from tallybook.rate_state s order by s.name for update) s;
  update tallybook.rate_state s
     set next_at = case when s.next_at > p_at then s.next_at - p_by else s.next_at end,
         front_at = case when s.front_at > p_at then s.front_at - p_by else s.front_at end,
         pushed_to = case when s.pushed_to > p_at then s.pushed_to - p_by else s.pushed_to end,
         promised_at = case when s.promised_at > p_at then s.promised_at - p_by else s.promised_at end,
         paced_to = case when s.paced_to > p_at then s.paced_to - p_by else s.paced_to end
   where greatest(s.next_at, s.front_at, s.pushed_to, s.promised_at, s.paced_to) > p_at;
  update tallybook.breaker_state b
     set failed_at = array(select case when f.at > p_at then f.at - p_by else f.at end
                             from unnest(b.failed_at) with ordinality f(at, n) order by f.n),
         changed_at = least(b.changed_at, p_at),
         open_until = case when b.open_until > p_at then b.open_until - p_by else b.open_until end
   where greatest(b.changed_at, b.open_until) > p_at;
end $$;
