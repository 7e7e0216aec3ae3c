-- nodes: the databases of one app, as recorded here; none if there is only one.
--> The databases of one app. Schedules of the code are stored in its home, the live one with the lowest number.
-- rights: producer, worker, operator, reader, metrics
create or replace view tallybook.nodes as
select n.number, n.name, n.address, n.state, n.number is not distinct from h.number as home, n.added_at, n.changed_at,
       n.system_identifier, n.seen_job_id, n.seen_at
  from tallybook.node n
 cross join (select min(l.number) as number from tallybook.node l where l.state = 'live') h;
