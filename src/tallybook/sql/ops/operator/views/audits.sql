-- audits: changes by people and programs. Newest first by `order by id desc`; for the next page add `id < last`. Both
-- use an index, also with one actor or one action.
--> Changes by people and programs: pages, the operator API, Django's admin and MCP.
-- rights: operator
create or replace view tallybook.audits as select a.id, a.at, a.actor, a.via, a.action, a.target, a.done
  from tallybook.audit a;
