"""Migrations under load: how they lock, and how they replace functions.

ALTER TABLE needs its table exclusively, and while it waits for a transaction that uses the table, everyone else waits
behind it. So a migration takes all its locks together, for less than `deadlock_timeout` (1 s by default), or gives up,
lets others pass and tries again. The limit must be shorter: otherwise, if a producer holds one of the tables and waits
for another, PostgreSQL would end that producer as the victim of the deadlock.

A call that waits for a table during a migration continues after the commit. If its function has been dropped by then,
PostgreSQL ends the user's transaction with "cache lookup failed for function". So a dropped function is renamed
instead: running calls find it by its number and end as usual, and new calls find the new function by its name. The next
migration, long after, drops the functions that the previous one has set aside.
"""

import re
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg import sql

BUSY = (pg.LockNotAvailable, pg.QueryCanceled, pg.DeadlockDetected)  # a migration did not get its locks

# PostgreSQL ends an autovacuum that blocks the migration, but only after a wait longer than deadlock_timeout.
_FOR_VACUUM = 2.0
_SHARE = 0.8

_TABLES = """\
select c.relname from pg_class c
 where c.relnamespace = 'tallybook'::regnamespace and (c.relname = any (%s) or c.relkind = 'v')
 order by c.relkind <> 'v', c.relname"""

_HOLDERS = """\
select a.pid, coalesce(nullif(a.application_name, ''), a.backend_type), a.state, a.backend_type = 'autovacuum worker',
       extract(epoch from clock_timestamp() - a.xact_start)::int
  from pg_stat_activity a
 where a.pid <> pg_backend_pid() and a.xact_start is not null and a.datname = current_database()
   and exists (select from pg_locks l join pg_class c on c.oid = l.relation
                where l.pid = a.pid and l.granted and c.relnamespace = 'tallybook'::regnamespace)
 order by a.xact_start limit 3"""


def altered(texts: Iterable[str]) -> set[str]:
    """Return the tables that these migrations need exclusively."""
    return set(re.findall(r"(?:alter table|\bon|drop table) tallybook\.(\w+)", "\n".join(texts), re.IGNORECASE))


def take(conn: psycopg.Connection[Any], tables: set[str], *, patient: bool) -> None:
    """Lock these tables and all views together until the end of the transaction; views first, like their readers.

    Raises one of BUSY if that takes too long. `patient`: wait long enough for an autovacuum to be ended.
    """
    asked = "select setting::int from pg_settings where name = 'deadlock_timeout'"
    (deadlock,) = conn.execute(asked).fetchone() or (0,)
    limit = max(_FOR_VACUUM * 1000, deadlock * 2) if patient else min(2000, deadlock * _SHARE)
    names = [row[0] for row in conn.execute(_TABLES, (sorted(tables),)).fetchall()]
    conn.execute("select set_config('statement_timeout', %s, true)", (str(int(limit)),))
    if tables and names:
        found = sql.SQL(", ").join(sql.Identifier("tallybook", name) for name in names)
        conn.execute(sql.SQL("lock table {} in access exclusive mode").format(found))
    conn.execute("set local statement_timeout = 0; set local lock_timeout = '2s'")  # for unforeseen locks


def holders(conn: psycopg.Connection[Any]) -> tuple[str, bool]:
    """Return the holders of locks on the tables, in words, and whether an autovacuum is among them."""
    rows = conn.execute(_HOLDERS).fetchall()
    found = [f"{name} (process {pid}, {state or 'busy'}, for {seconds} s)" for pid, name, state, _, seconds in rows]
    return ", ".join(found) or "a short transaction", any(row[3] for row in rows)


_DROP = re.compile(r"^drop function if exists (tallybook\.(\w+)\([^;]*\));$", re.MULTILINE | re.IGNORECASE)
_RENAME = """\
do $$ begin
  if to_regprocedure('{signature}') is not null then alter function {signature} rename to "_old_{name}"; end if;
end $$;"""


def aside(text: str) -> str:
    """Rename functions in a migration's text instead of dropping them; names have at most 63 bytes, ours are short."""
    return _DROP.sub(lambda match: _RENAME.format(signature=match[1], name=match[2]), text)


def set_aside(conn: psycopg.Connection[Any]) -> list[str]:
    """Return functions that an earlier migration has set aside, each with the types of its arguments, in SQL."""
    rows = conn.execute(
        "select p.oid::regprocedure::text from pg_proc p"
        " where p.pronamespace = 'tallybook'::regnamespace and p.proname like '\\_old\\_%'"
    )
    return [row[0] for row in rows]
