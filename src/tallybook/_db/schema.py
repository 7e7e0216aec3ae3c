"""Whether this release can use the installed schema.

A release expects the version of its own newest migration. `works_from` of a newer schema is the lowest expected version
of a library that can use it. An older schema lacks things that this release needs.
"""

import json
from typing import Any

import psycopg

from tallybook.errors import SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld, SchemaUnreleased

UNDEFINED = ("42883", "42P01", "42703", "42704", "3F000")
"""SQLSTATEs of a missing function, table, column, type or schema: the schema may have been migrated, or dropped."""

# Reads the catalog itself: the cache behind to_regclass may be older than a lock that this transaction has waited for.
_THERE = """\
select coalesce(bool_or(c.relname = 'installed'), false), coalesce(bool_or(c.relname = 'installation'), false)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'tallybook' and c.relname in ('installed', 'installation')"""
_ROW = "select to_jsonb(i)::text from tallybook.installed i"
_TABLE_ROW = "select to_jsonb(i)::text from tallybook.installation i"


def installed(conn: psycopg.Connection[Any]) -> dict[str, Any] | None:
    """Return the row of the installation, or None. As JSON, because other releases may have other columns.

    Raises SchemaUnreleased for a schema made before 0.1.0, which cannot be upgraded to a release.
    """
    there = conn.execute(_THERE).fetchone()
    if there == (False, False):
        return None
    row = conn.execute(_ROW if there == (True, True) else _TABLE_ROW).fetchone()
    found: dict[str, Any] | None = json.loads(row[0]) if row else None
    if found is not None and "routines" not in found:
        raise SchemaUnreleased(found["version"])
    return found


def is_installed(conn: psycopg.Connection[Any]) -> bool:
    """Whether this database has a schema of Tallybook, of any version; your own schema of that name does not count."""
    return conn.execute(_THERE).fetchone() in ((True, True), (False, True))


def verdict(version: int, works_from: int | None, expected: int, database: str) -> SchemaError | None:
    """Return why a release that expects this version cannot use a schema of that version; None if it can."""
    if version == 0:
        return SchemaMissing(database)
    if version < expected:
        return SchemaTooOld(version, expected)
    if version > expected and (works_from is None or works_from > expected):
        return SchemaTooNew(version, expected)
    return None


def refusal(conn: psycopg.Connection[Any], expected: int) -> SchemaError | None:
    """Return the verdict on a database: one short statement, outside a transaction."""
    try:
        row = conn.execute(_ROW).fetchone()
        found = json.loads(row[0]) if row else {"version": 0}
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        found = installed(conn) or {"version": 0}
    return verdict(found["version"], found.get("works_from"), expected, conn.info.dbname)
