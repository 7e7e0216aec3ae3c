"""Fixtures of the core's tests."""

from datetime import datetime
from typing import Any

import pytest

from support.database import Connect, Connection, one
from support.hands import Hands


@pytest.fixture
def hands(db: Connection) -> Hands:
    """A worker made of SQL alone, on queue q."""
    return Hands(db)


@pytest.fixture
def now(db: Connection) -> datetime:
    """The server's time."""
    return one(db, "select clock_timestamp()")


@pytest.fixture
def quick(connect: Connect) -> Connect:
    """Open connections on which a long wait for a lock raises LockNotAvailable."""

    def open_one(**kwargs: Any) -> Connection:
        conn = connect(**kwargs)
        conn.execute("set lock_timeout = '1500ms'")
        if not conn.autocommit:
            conn.commit()
        return conn

    return open_one


@pytest.fixture
def careless(db: Connection) -> Connection:
    """A connection whose commits do not wait for the disk, for tests that crash no server."""
    for setting in ("synchronous_commit = off", "jit = off", "statement_timeout = '60 s'"):
        db.execute(f"set {setting}".encode())
    return db
