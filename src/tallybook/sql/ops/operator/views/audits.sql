-- audits: what people have changed, and who. Newest first by `order by id desc`, on with `id < last` of the page
-- before: both by index, with one actor or one action, too.
-- rights: operator
create or replace view tallybook.audits as select a.id, a.at, a.actor, a.via, a.action, a.target, a.done
  from tallybook.audit a;
comment on view tallybook.audits is
  'What people have changed by pages, the API and others that put it on record, and who.';
