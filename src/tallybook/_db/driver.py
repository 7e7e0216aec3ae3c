"""The driver's names for the rooms above: its connections, the errors that they catch, and how to open a connection.

Other rooms import psycopg only where a public signature or a need of their own asks for it: tests/test_rooms.py lists them.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import Error, Notify, OperationalError, Rollback
from psycopg.errors import InvalidSchemaName, LockNotAvailable, UndefinedFunction

__all__ = [
    "AsyncConnection",
    "Connection",
    "Error",
    "InvalidSchemaName",
    "LockNotAvailable",
    "Notify",
    "OperationalError",
    "Rollback",
    "UndefinedFunction",
    "connect",
    "connect_async",
]

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

connect = psycopg.Connection.connect
connect_async = psycopg.AsyncConnection.connect
