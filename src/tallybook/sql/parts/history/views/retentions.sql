-- retentions: the retention periods.
-- rights: operator, reader
create or replace view tallybook.retentions as select r.name as class, r.keep, r.what from tallybook.retention_class r;
comment on view tallybook.retentions is 'The retention periods; change them with retention_set.';
