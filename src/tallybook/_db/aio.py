"""Run a Call on the caller's own asynchronous connection: see sync.py."""

from collections.abc import Coroutine
from typing import Any

from tallybook._db.declared import Call, T
from tallybook._db.sync import run_on


def run(conn: Any, call: Call[T]) -> Coroutine[Any, Any, T]:
    """Return the result of `call` on `conn`. Raises ConnectionNotSupported for an object that is no such connection."""
    return run_on(conn, call, sync=False)
