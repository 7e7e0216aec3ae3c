"""Functions that a migration replaces by others, under callers that are inside of them.

A call that waits for a table while a migration has it comes back after the commit. If its function has been dropped then,
PostgreSQL ends the user's transaction with "cache lookup failed for function". So what a migration drops is renamed out of
the way: who is inside finds it by its number and ends as usual, who calls finds the new one by its name. The next
migration, long after, drops what the one before it has set aside.
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
    """A migration's text with its functions renamed instead of dropped; a name is at most 63 bytes and ours are short."""
    return _DROP.sub(lambda match: _RENAME.format(signature=match[1], name=match[2]), text)


def set_aside(conn: psycopg.Connection[Any]) -> list[sql.Composed]:
    """Functions that an earlier migration has set aside, each with the types of its arguments."""
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
