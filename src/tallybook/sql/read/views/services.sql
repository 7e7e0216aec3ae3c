-- services: the maintenance that any worker runs: how often, and when it ran last.
-- rights: operator, reader
create or replace view tallybook.services as select * from tallybook.service;
comment on view tallybook.services is 'Maintenance that any worker runs.';
