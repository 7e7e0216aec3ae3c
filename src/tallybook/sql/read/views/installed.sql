-- installed: the installation, in one row. Every program checks it first.
-- rights: producer, worker, operator, reader, metrics
create or replace view tallybook.installed as select * from tallybook.installation;
comment on view tallybook.installed is 'The installation, in one row.';
