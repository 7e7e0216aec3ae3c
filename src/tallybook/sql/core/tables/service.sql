create table tallybook.service (
  name        text primary key,
  every       interval not null,
  last_run_at timestamptz,
  last_took   interval,
  last_effect bigint,
  constraint "a service runs every 0.1 s to 1 day" check (every between interval '100 ms' and interval '1 day')
) with (fillfactor = 50);
comment on table tallybook.service is
  'Maintenance that any worker runs: how often at least, and what the last run did. Change every as you like.';
comment on column tallybook.service.every is
  'The longest time between two looks of one worker; what is known to be due is not waited for.';
comment on column tallybook.service.last_run_at is
  'Of the last recorded run. A service that has nothing to do runs once a minute, whatever every is.';
comment on column tallybook.service.last_effect is
  'How many jobs, or rows, the last recorded run has changed. At most one run a second is recorded.';
insert into tallybook.service (name, every) values ('promote', '5 s'), ('rescue', '5 s');
