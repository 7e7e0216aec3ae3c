--> Maintenance that any worker runs: how often at least, and what the last run did. Change every as you like.
create table tallybook.service (
  name        text primary key,
  --> The longest time between two looks of one worker; what is known to be due is not waited for.
  every       interval not null,
  --> Of the last recorded run. A service that has nothing to do runs once a minute, whatever every is.
  last_run_at timestamptz,
  last_took   interval,
  --> How many jobs, or rows, the last recorded run has changed. At most one run a second is recorded.
  last_effect bigint,
  constraint "a service runs every 0.1 s to 1 day" check (every between interval '100 ms' and interval '1 day')
) with (fillfactor = 50);
insert into tallybook.service (name, every) values ('promote', '5 s'), ('rescue', '5 s');
