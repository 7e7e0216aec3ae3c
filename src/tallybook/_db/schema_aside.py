"""Functions that a migration replaces while callers are inside them.

A call that waits for a table during a migration continues after the commit. If its function has been dropped by then,
PostgreSQL ends the user's transaction with "cache lookup failed for function". So a dropped function is renamed
instead: running calls find it by its number and end as usual, and new calls find the new function by its name. The next
migration, long after, drops the functions that the previous one has set aside.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import sql

_DROP = re.compile(r"^drop function if exists (tallybook\.(\w+)\([^;]*\));$", re.MULTILINE | re.IGNORECASE)
_RENAME = """\
do $$ begin
  if to_regprocedure('{signature}') is not null then alter function {signature} rename to "_old_{name}"; end if;
end $$;"""


def aside(text: str) -> str:
    """Rename functions in a migration's text instead of dropping them; names have at most 63 bytes, ours are short."""
    return _DROP.sub(lambda match: _RENAME.format(signature=match[1], name=match[2]), text)


def set_aside(conn: psycopg.Connection[Any]) -> list[sql.Composed]:
    """Return functions that an earlier migration has set aside, each with the types of its arguments."""
    rows = conn.execute(
        "select p.proname, array(select t.typnamespace::regnamespace::text from unnest(p.proargtypes) with ordinality a(oid, n)"
        "                          join pg_type t on t.oid = a.oid order by a.n),"
        "       array(select t.typname::text from unnest(p.proargtypes) with ordinality a(oid, n)"
        "               join pg_type t on t.oid = a.oid order by a.n)"
        "  from pg_proc p where p.pronamespace = 'tallybook'::regnamespace and p.proname like '\\_old\\_%'"
    ).fetchall()
    return [
        sql.SQL("{}({})").format(
            sql.Identifier("tallybook", name),
            sql.SQL(", ").join(sql.Identifier(*of) for of in zip(spaces, types, strict=True)),
        )
        for name, spaces, types in rows
    ]
