"""Where a verb runs: on the caller's connection, or on one of the App's own."""

from __future__ import annotations

from typing import TypeVar

from tallybook._db import aio, sync
from tallybook._db.calls import Call
from tallybook._db.source import Source

__all__ = ["run", "run_sync"]

T = TypeVar("T")


async def run(conn: object, call: Call[T]) -> T:
    """The result of `call` on the caller's connection, or on one of the App's own."""
    return await (conn._run(call) if isinstance(conn, Source) else aio.run(conn, call))


def run_sync(conn: object, call: Call[T]) -> T:
    """The same on a synchronous connection."""
    return conn._run_sync(call) if isinstance(conn, Source) else sync.run(conn, call)
