"""Take a guard out of a SQL function, for negative controls."""

from __future__ import annotations

import re
from typing import Any

import psycopg

from tallybook._db.migrate import routines


def source(function: str) -> Any:
    """The text of the file that makes this function, to put a copy without a guard into a test's database."""
    made = re.compile(rf"^create or replace function tallybook\.{function}\(", re.MULTILINE)
    (found,) = (text for _, text in routines() if made.search(text))
    return found


def without(db: psycopg.Connection[tuple[Any, ...]], function: str, guard: str, instead: str = "") -> None:
    """Replace this text in the function's definition, in this database only; it has to be there."""
    row = db.execute(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'tallybook'::regnamespace and proname = %s",
        [function],
    ).fetchone()
    assert row is not None, f"there is no function {function}"
    assert guard in row[0], f"{function} does not say {guard!r}"
    db.execute(row[0].replace(guard, instead))
