"""Take a guard out of a SQL function, for negative controls."""

from __future__ import annotations

from typing import Any

import psycopg


def without(db: psycopg.Connection[tuple[Any, ...]], function: str, guard: str, instead: str = "") -> None:
    """Replace this text in the function's definition, in this database only; it has to be there."""
    row = db.execute(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'tallybook'::regnamespace and proname = %s",
        [function],
    ).fetchone()
    assert row is not None, f"there is no function {function}"
    assert guard in row[0], f"{function} does not say {guard!r}"
    db.execute(row[0].replace(guard, instead))
