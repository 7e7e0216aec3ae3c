-- services: the maintenance services: interval and last run.
--> The maintenance services, which any worker runs.
-- rights: operator, reader
create or replace view tallybook.services as select * from tallybook.service;
