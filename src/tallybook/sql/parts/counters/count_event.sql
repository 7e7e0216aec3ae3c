-- count_event(name, n): count something of your own, in your transaction; a rollback undoes it. One small row is
-- appended, so sessions that count the same name never wait for each other. Read it with event_counts() and
-- event_series().
-- Errors: TB005 a name that is empty, longer than 200 bytes or has invisible characters, an n that is 0 or null. Writes
-- tally.
-- rights: producer, worker, operator
create or replace function tallybook.count_event(name text, n int default 1) returns void
language plpgsql as $$
begin
  perform tallybook._check_name('event', name, 200);
  perform tallybook._refuse(coalesce(n, 0) = 0, 'an event is counted by a number other than 0',
                            'A negative one takes back what was counted.');
  insert into tallybook.tally (n, what, task) values (count_event.n, 'event', count_event.name);
end $$;
