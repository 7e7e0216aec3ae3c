"""Words of all tests for their database: a connection, one that opens more of them, one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[..., Connection]


def one(db: psycopg.Connection[Any], query: Any, *params: Any) -> Any:
    """The first column of the first row, which has to be there. One dict is parameters by name; without any, % is a letter."""
    row = db.execute(
        query, params[0] if len(params) == 1 and isinstance(params[0], dict) else params or None
    ).fetchone()
    assert row is not None, f"no row: {query}"
    return row[0]
