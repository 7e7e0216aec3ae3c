-- services: the maintenance services: interval and last run.
-- rights: operator, reader
create or replace view tallybook.services as select * from tallybook.service;
comment on view tallybook.services is 'The maintenance services, which any worker runs.';
