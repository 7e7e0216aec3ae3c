"""psycopg's names for the layers above: its connections, errors to catch, and functions to connect.

Other layers import psycopg only for a public signature or a special need; tests/package/test_layers.py lists them.
"""

from typing import Any

import psycopg
from psycopg import DataError, Error, Notify, OperationalError, Rollback
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import (
    InsufficientPrivilege,
    InvalidSchemaName,
    LockNotAvailable,
    QueryCanceled,
    UndefinedFunction,
    UndefinedTable,
)
from psycopg.pq import Conninfo

__all__ = [
    "AsyncConnection", "Connection", "Conninfo", "DataError", "Error", "InsufficientPrivilege", "InvalidSchemaName",
    "LockNotAvailable", "Notify", "OperationalError", "QueryCanceled", "Rollback", "UndefinedFunction",
    "UndefinedTable", "connect", "connect_async", "conninfo_to_dict", "make_conninfo",
]  # fmt: skip

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

connect = psycopg.Connection.connect
connect_async = psycopg.AsyncConnection.connect
