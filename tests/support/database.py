"""Words of all tests for their database: a connection, one that opens more of them, one value, a call, a database of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[..., Connection]
Row = tuple[Any, ...]


def one(db: psycopg.Connection[Any], query: Any, *params: Any) -> Any:
    """The first column of the first row, which has to be there. One dict is parameters by name; without any, % is a letter."""
    row = db.execute(
        query, params[0] if len(params) == 1 and isinstance(params[0], dict) else params or None
    ).fetchone()
    assert row is not None, f"no row: {query}"
    return row[0]


def call(db: Connection, verb: str, columns: str = "*", **args: Any) -> list[Row]:
    """Select these columns from a function of Tallybook, whose arguments are given by name; a dict is JSON."""
    values = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in args.items()}
    names = ", ".join(f"{name} => %({name})s" for name in values)
    return db.execute(f"select {columns} from tallybook.{verb}({names})", values).fetchall()  # type: ignore[arg-type]  # noqa: S608


@contextmanager
def fresh(server: Any, template: str) -> Iterator[str]:
    """A database for several tests, made from this template and dropped at the end: its conninfo."""
    name = f"tallybook_shared_{secrets.token_hex(6)}"
    dsn = server.create_database(name, template)
    try:
        yield dsn
    finally:
        server.drop_database(name)
