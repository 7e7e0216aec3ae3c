-- concurrency: each key of a concurrency limit of which permits are held or waited for, and the rules that no key uses.
-- rights: operator, reader
create or replace view tallybook.concurrency as
select k.name, r.name as rule, r.most,
       (select count(*) from tallybook.concurrency_holder h
         where h.name = k.name and not exists (
           select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid
                  and o.entry_seq = h.seq)) as held,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from (select h.name from tallybook.concurrency_holder h union select l.name from tallybook.concurrency_line l
        union select c.name from tallybook.concurrency_limit c) k
  left join lateral (
    select r.name, r.most from tallybook.concurrency_limit r where r.name in (k.name, split_part(k.name, ':', 1))
     order by r.name = k.name desc limit 1) r on true;
comment on view tallybook.concurrency is
  'Each key of a concurrency limit: its rule, how many hold a permit, how many wait for one.';
