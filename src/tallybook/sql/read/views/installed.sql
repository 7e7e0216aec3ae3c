-- installed: the installation, in one row. Every program checks it first.
--> The installation, in one row.
-- rights: producer, worker, operator, reader, metrics
create or replace view tallybook.installed as select * from tallybook.installation;
