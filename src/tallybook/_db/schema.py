"""Whether this release can work with the schema that is there.

A release expects the version of its own newest migration. A schema that is newer says by `works_from` from which expected
version on a library may still work with it; one that is older lacks what this release needs.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg

from tallybook.errors import SchemaError, SchemaMissing, SchemaTooNew, SchemaTooOld, SchemaUnreleased

UNDEFINED = ("42883", "42P01", "42703", "42704", "3F000")
"""SQLSTATEs of a function, table, column, type or schema that is not there: the schema may have been migrated, or dropped."""

_ROW = "select to_jsonb(i)::text from tallybook.installed i"
_TABLE_ROW = "select to_jsonb(i)::text from tallybook.installation i"


def installed(conn: psycopg.Connection[Any]) -> dict[str, Any] | None:
    """The row of the installation; None: there is none. As JSON, since another release's may have other columns.

    SchemaUnreleased: it was made before 0.1.0, and nothing leads from it to a schema of a release.
    """
    there = conn.execute(
        "select to_regclass('tallybook.installed') is not null, to_regclass('tallybook.installation') is not null"
    ).fetchone()
    if there == (False, False):
        return None
    row = conn.execute(_ROW if there == (True, True) else _TABLE_ROW).fetchone()
    found: dict[str, Any] | None = json.loads(row[0]) if row else None
    if found is not None and "routines" not in found:
        raise SchemaUnreleased(found["version"])
    return found


def verdict(version: int, works_from: int | None, expected: int, database: str) -> SchemaError | None:
    """Why a release that expects this version cannot work with a schema of that one; None: it can."""
    if version == 0:
        return SchemaMissing(database)
    if version < expected:
        return SchemaTooOld(version, expected)
    if version > expected and (works_from is None or works_from > expected):
        return SchemaTooNew(version, expected)
    return None


def refusal(conn: psycopg.Connection[Any], expected: int) -> SchemaError | None:
    """The same by a look at the database: one short statement, outside of a transaction."""
    try:
        row = conn.execute(_ROW).fetchone()
        found = json.loads(row[0]) if row else {"version": 0}
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        found = installed(conn) or {"version": 0}
    return verdict(found["version"], found.get("works_from"), expected, conn.info.dbname)
