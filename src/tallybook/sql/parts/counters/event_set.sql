-- event_set(name, n): set the count of an event of your own to n, in your transaction; concurrent counts are added.
-- 0 removes the event: event_counts omits it until its next count, and event_series keeps its history. Returns the
-- previous count. Locks: one for all events until the end of the transaction, so calls of event_set wait for each
-- other; count_event never waits.
-- Errors: TB003 isolation level, TB005 a name that count_event refuses, an n that is not within 2^31 of the previous
-- count. Reads total, series, fold, tally; writes tally.
-- rights: producer, worker, operator
create or replace function tallybook.event_set(name text, n bigint) returns bigint
language plpgsql as $$
declare v_before bigint;
begin
  perform tallybook._check_name('event', name, 200);
  perform tallybook._read_committed('event_set needs READ COMMITTED, this transaction is %s');
  perform pg_advisory_xact_lock(1413565449, hashtext('events: set one at a time'));
  v_before := coalesce((select c.n from tallybook.event_counts() c where c.name = event_set.name), 0);
  perform tallybook._refuse(coalesce(abs(event_set.n::numeric - v_before) >= 2147483648, true),
    format('an event cannot be set from %s to %s', v_before, coalesce(event_set.n::text, 'null')),
    'By less than 2^31 at a time.');
  if event_set.n <> v_before then perform tallybook.count_event(name, (event_set.n - v_before)::int); end if;
  return v_before;
end $$;
