"""Connections of the application's own, for callers that have none at hand.

They are in autocommit: every verb is one statement, so one transaction, and two of three round trips are saved.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tallybook._db import aio, sync
from tallybook._db.calls import Call
from tallybook.errors import ConfigError, QueueUnavailable, SchemaMissing

if TYPE_CHECKING:
    import psycopg
    from psycopg_pool import AsyncConnectionPool

__all__ = ["Source"]

T = TypeVar("T")


class Source:
    """Where an application's own connections come from. Nothing is opened, read or imported until one is needed."""

    def __init__(self, name: str, dsn: str | None) -> None:
        self.name = name
        self.dsn = dsn
        self._pool: AsyncConnectionPool[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def conninfo(self, dsn: str | None = None) -> str:
        """The connection string in force: `dsn`, the App's own, TALLYBOOK_DSN, or libpq's PG* variables (empty).

        A URL as SQLAlchemy writes it, `postgresql+psycopg://...`, is understood. ConfigError for what is none.
        """
        from psycopg import ProgrammingError
        from psycopg.conninfo import make_conninfo

        given = dsn or self.dsn or os.environ.get("TALLYBOOK_DSN", "")
        try:
            return make_conninfo(
                re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", given),
                fallback_application_name=f"tallybook {self.name}",
            )
        except ProgrammingError:  # its text, and the value, may hold a password
            hint = "Write host=... dbname=... user=..., or postgresql://user@host/dbname"
            raise ConfigError("dsn", "(not shown)", "not a connection string", hint=hint) from None

    @asynccontextmanager
    async def open(self, *, dsn: str | None = None, max_size: int = 4) -> AsyncIterator[None]:
        """Keep a small pool of connections while the block runs, at most `max_size`, for verbs that are given the App.

        Opening it inside itself uses the outer pool. QueueUnavailable if the server cannot be reached at the start.

            async with app.open():
                await send_welcome.enqueue(app, 42)
        """
        if self._pool is not None and self._loop is asyncio.get_running_loop():
            yield
            return
        from psycopg_pool import AsyncConnectionPool

        from tallybook._db.link import CONNECT

        conninfo = self.conninfo(dsn)
        async with self._connect(conninfo):  # the pool itself would only say that it took too long
            pass
        name = f"tallybook {self.name}"
        pool = AsyncConnectionPool(conninfo, min_size=1, max_size=max_size, open=False, name=name, kwargs=CONNECT)
        async with pool:
            self._pool, self._loop = pool, asyncio.get_running_loop()
            try:
                yield
            finally:
                self._pool = self._loop = None

    async def _run(self, call: Call[T]) -> T:
        from psycopg.errors import InvalidSchemaName

        async with self._connection() as conn:
            try:
                return await aio.run(conn, call)
            except InvalidSchemaName as error:
                raise SchemaMissing(conn.info.dbname) from error

    def _run_sync(self, call: Call[T]) -> T:
        from psycopg.errors import InvalidSchemaName

        with self._connect_sync(self.conninfo()) as conn:
            try:
                return sync.run(conn, call)
            except InvalidSchemaName as error:
                raise SchemaMissing(conn.info.dbname) from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        pool = self._pool
        if pool is None or self._loop is not asyncio.get_running_loop():
            async with self._connect(self.conninfo()) as conn:
                yield conn
            return
        from psycopg_pool import PoolTimeout

        from tallybook._db.link import dsn_for_people

        try:
            conn = await pool.getconn()
        except PoolTimeout as error:
            raise QueueUnavailable(dsn_for_people(self.conninfo()), str(error)) from error
        try:
            yield conn
        finally:
            await pool.putconn(conn)

    @asynccontextmanager
    async def _connect(self, conninfo: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        import psycopg

        from tallybook._db.link import CONNECT, dsn_for_people

        try:
            conn = await psycopg.AsyncConnection.connect(conninfo, **CONNECT)
        except psycopg.OperationalError as error:
            raise QueueUnavailable(dsn_for_people(conninfo), _reason(error)) from error
        async with conn:
            yield conn

    @contextmanager
    def _connect_sync(self, conninfo: str) -> Iterator[psycopg.Connection[Any]]:
        import psycopg

        from tallybook._db.link import CONNECT, dsn_for_people

        try:
            conn = psycopg.Connection.connect(conninfo, **CONNECT)
        except psycopg.OperationalError as error:
            raise QueueUnavailable(dsn_for_people(conninfo), _reason(error)) from error
        with conn:
            yield conn


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0].removeprefix("connection failed: ")
