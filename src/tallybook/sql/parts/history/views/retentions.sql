-- retentions: the retention periods.
--> The retention periods; change them with retention_set.
-- rights: operator, reader
create or replace view tallybook.retentions as select r.name as class, r.keep, r.what from tallybook.retention_class r;
