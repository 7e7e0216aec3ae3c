-- concurrency: each key of a concurrency limit of which permits are held or waited for, and the rules that no key uses.
-- rights: operator, reader
create or replace view tallybook.concurrency as
select k.name, r.name as rule, r.most,
       (select count(*) from tallybook.concurrency_holder h
         where h.name = k.name and not exists (
           select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid
                  and o.entry_seq = h.seq)) as held,
       (select count(*) from tallybook.concurrency_line l where l.name = k.name) as waiting
  from (select distinct n.name from tallybook._limit_key_name n where n.kind = 'concurrency') k
  left join lateral (
    select r.* from tallybook.limit_rule r
     where r.kind = 'concurrency' and r.name in (k.name, split_part(k.name, ':', 1))
     order by r.name = k.name desc limit 1) r on true;
comment on view tallybook.concurrency is
  'Each key of a concurrency limit: its rule, how many hold a permit, how many wait for one.';
