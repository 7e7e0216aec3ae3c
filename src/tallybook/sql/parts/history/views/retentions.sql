-- retentions: how long what is kept.
-- rights: operator, reader
create or replace view tallybook.retentions as select r.name as class, r.keep, r.what from tallybook.retention_class r;
comment on view tallybook.retentions is 'How long what is kept: change it with retention_set.';
