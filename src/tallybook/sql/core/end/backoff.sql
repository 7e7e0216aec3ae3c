-- backoff(failures): the default delay before the next attempt: 5 s x 2^(failures-1), at most 6 h, with full jitter.
-- rights: nobody, as the caller
create or replace function tallybook.backoff(failures int) returns interval
language sql volatile as $$
  select make_interval(secs => random() * least(5 * power(2, least(greatest(failures, 1), 30) - 1), 21600))
$$;
