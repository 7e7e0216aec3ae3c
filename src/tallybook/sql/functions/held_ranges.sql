-- held_ranges(at): the ranges of history whose time is over and that are still there, for people: since when they were due, what is
-- open in them, and why they stay. open_jobs null: none of its own.
-- What no prune has come to yet is not shown. Reads history_range, retention_class, and the server's locks.
create or replace function tallybook.held_ranges(at timestamptz default clock_timestamp())
returns table (class text, lower xid8, upper xid8, due_at timestamptz, open_jobs bigint, why text)
language plpgsql stable as $$
#variable_conflict use_column
begin
  return query
  select f.name, r.lower::text::xid8, r.upper::text::xid8, coalesce(h.newest_end, h.quiet_since) + f.keep,
         nullif(h.open, 0), case when h.held = 'a reader' then coalesce('a reader: pid ' || k.pids, 'a reader that has gone: it goes with the next run') else h.held end
    from tallybook._families() f, lateral tallybook._ranges(f.parents[1]) r
    join pg_catalog.pg_class c on c.oid = r.leaf
    join tallybook.history_range h on h.leaf = c.relname
    left join lateral (
      select string_agg(distinct l.pid::text, ', ') as pids from pg_catalog.pg_locks l
       where l.locktype = 'relation' and l.granted and l.pid <> pg_backend_pid()
         and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
         and l.relation = any (tallybook._range_leaves(f.parents, r.lower)::oid[])) k on h.held = 'a reader'
   where h.held is not null and coalesce(h.newest_end, h.quiet_since) + f.keep <= held_ranges.at;
end $$;
