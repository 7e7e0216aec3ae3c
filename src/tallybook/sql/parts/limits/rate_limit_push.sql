-- rate_limit_push(name, until): start no call of this key before this time, for example after a 429 with Retry-After.
--
-- Waiting jobs keep their order; those that come too early wait again. A time before the recorded one changes nothing.
-- Returns when the next call may start. Errors: TB005 an unknown limit, or a time before 2000 or after 9998. Locks the
-- key's row until the end of the transaction: commit at once, because no job of the key starts meanwhile.
-- Writes rate_state.
-- rights: worker, operator
create or replace function tallybook.rate_limit_push(name text, until timestamptz) returns timestamptz
language sql as $$
  select tallybook._refuse(not exists (select from tallybook._limit_of('rate', rate_limit_push.name)),
                           'there is no rate limit ' || rate_limit_push.name, 'Create one with rate_limit_set.'),
         tallybook._check_range('until', until::text, until between '2000-01-01' and '9999-01-01', null);
  insert into tallybook.rate_state as s (name, next_at, front_at, pushed_to, granted)
  values (rate_limit_push.name, until, '-infinity', until, 0)
  on conflict (name) do update
     set next_at = greatest(s.next_at, excluded.next_at), pushed_to = greatest(s.pushed_to, excluded.pushed_to)
  returning s.next_at
$$;
