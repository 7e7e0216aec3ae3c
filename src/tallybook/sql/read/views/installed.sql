-- installed: what is installed here; one row. What every program looks at before it works.
-- rights: producer, worker, operator, reader, metrics
create or replace view tallybook.installed as select * from tallybook.installation;
comment on view tallybook.installed is 'One row: what is installed here.';
