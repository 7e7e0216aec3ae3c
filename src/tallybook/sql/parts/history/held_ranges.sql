-- held_ranges(at): list the ranges of history that should have been deleted: since when they were due, their open jobs,
-- and what holds them. open_jobs null: it has none.
-- A range that no prune could close yet is due 1.25 times its retention after it began.
-- A range that no prune has checked yet is not shown. Reads history_range, retention_class, and the server's locks and
-- transactions.
-- rights: operator, reader
create or replace function tallybook.held_ranges(at timestamptz default clock_timestamp())
returns table (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
language sql stable as $$
  select f.name, r.lower::text::xid8, r.upper::text::xid8, d.due_at, nullif(h.open, 0),
         case h.held
           when 'a reader' then coalesce(
             (select 'a reader: ' || string_agg(distinct coalesce(
                       'pid ' || l.pid, 'the prepared transaction ' || quote_literal(p.gid)), ', ')
                from pg_catalog.pg_locks l
                left join pg_catalog.pg_prepared_xacts p on l.virtualtransaction = '-1/' || p.transaction
               where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
                 and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
                 and l.relation = any ((r.leaves || case when h.quiet_since is null then f.parents end)::oid[])),
             'a reader that has ended: the next prune drops the range')
           when 'an open transaction' then coalesce(
             (select 'an open transaction: ' || string_agg(coalesce(  -- of any database
                       'pid ' || a.pid, 'the prepared transaction ' || quote_literal(p.gid), 'transaction ' || x), ', '
                       order by x)
                from pg_snapshot_xip(pg_current_snapshot()) x
                left join pg_catalog.pg_stat_activity a on a.backend_xid::text = (x::text::numeric % 4294967296)::text
                left join pg_catalog.pg_prepared_xacts p on p.transaction::text = (x::text::numeric % 4294967296)::text
               where x::text::numeric < r.upper),
             'an open transaction that has ended: the next prune drops the range')
           else h.held end
    from tallybook._families() f, lateral tallybook._family_ranges(f.parents) r
    join pg_catalog.pg_class c on c.oid = r.leaves[1]
    join tallybook.history_range h on h.leaf = c.relname,
         lateral (select coalesce(h.newest_end, least(h.quiet_since, h.begun_at + f.keep / 4)) + f.keep) d(due_at)
   where h.held is not null and d.due_at <= held_ranges.at order by f.name, r.lower
$$;
