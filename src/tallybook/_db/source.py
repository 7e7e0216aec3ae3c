"""The application's own connections, for callers that pass none.

They are in autocommit: every verb is one statement, so one transaction. This saves two of three round trips.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tallybook._db.declared import Call, T
from tallybook._db.sync import done, got
from tallybook._model.at_node import at_node
from tallybook._model.tracing import Tracing
from tallybook.errors import ConfigError, NotSupported, QueueUnavailable, SchemaMissing

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool


class Source:
    """An application's own connections. Nothing is opened, read or imported until one is needed."""

    def __init__(self, name: str, dsn: str | None) -> None:
        self.name = name
        self.dsn = dsn
        self._tracing: Tracing | None = None  # set by `tallybook.otel.instrument`
        self._pools: dict[tuple[int, asyncio.AbstractEventLoop], AsyncConnectionPool[Any]] = {}
        """By process and event loop: a loop cannot use the connections of another."""

    def conninfo(self, dsn: str | None = None) -> str:
        """Return the effective DSN: `dsn`, the App's own, TALLYBOOK_DSN, or an empty one for libpq's PG* variables.

        In a handler of a job on one of several nodes, that node's DSN precedes the App's own. URLs of SQLAlchemy,
        `postgresql+psycopg://...`, are accepted. Raises ConfigError for an invalid string.
        """
        at = at_node.get()  # in a handler of a job on one of several nodes: that node
        given = dsn or (at and at.dsn) or self.dsn or os.environ.get("TALLYBOOK_DSN", "")
        try:
            plain = re.sub(r"^(postgres(?:ql)?)\+\w+://", r"\1://", given)
            return make_conninfo(plain, fallback_application_name=f"tallybook {self.name}")
        except psycopg.ProgrammingError:  # its text, and the value, may contain a password
            hint = "Write host=... dbname=... user=..., or postgresql://user@host/dbname"
            raise ConfigError("dsn", "(not shown)", "not a connection string", hint=hint) from None

    @asynccontextmanager
    async def open(
        self, *, dsn: str | None = None, max_size: int = 4, timeout: timedelta = timedelta(seconds=30)
    ) -> AsyncIterator[None]:
        """Keep a small pool of at most `max_size` connections during the block, for verbs that get the App.

        If all are taken, a caller waits at most `timeout`, then gets QueueUnavailable. A nested call uses the outer
        pool. Another event loop, or a process forked from this one, does not use it, and may open its own. Raises
        QueueUnavailable if the server cannot be reached at the start.

            async with app.open():
                await send_welcome.enqueue(app, 42)
        """
        if self._own_pool() is not None:
            yield
            return
        from psycopg_pool import AsyncConnectionPool

        from tallybook._db.link import CONNECT
        from tallybook._db.pooler import IS_SESSION

        conninfo = self.conninfo(dsn)
        async with self._connect(conninfo) as conn:  # the pool's own error would only be a time-out
            cursor = await conn.execute(IS_SESSION, (conn.info.backend_pid,))
            pooled = await cursor.fetchone() != (True,)
        options = {**CONNECT, "prepare_threshold": None if pooled else 5}
        pool = AsyncConnectionPool(
            conninfo, min_size=1, max_size=max_size, timeout=timeout.total_seconds(), open=False,
            name=f"tallybook {self.name}", kwargs=options,
        )  # fmt: skip
        for key in list(self._pools):
            if key[1].is_closed():  # before its block ended
                self._pools.pop(key, None)
        key = (os.getpid(), asyncio.get_running_loop())
        async with pool:
            self._pools[key] = pool
            try:
                yield
            finally:
                self._pools.pop(key, None)

    def _own_pool(self) -> AsyncConnectionPool[Any] | None:
        """Return the pool of this process and this loop, or None.

        A pool inherited by a fork is left alone, because its sockets are the parent's: closing it would use them.
        """
        pool = self._pools.get((os.getpid(), asyncio.get_running_loop())) if self._pools else None
        if pool is not None and at_node.get() is not None and self.conninfo() != pool.conninfo:
            return None  # the pool is of another node than the job
        return pool

    async def _run(self, call: Call[T]) -> T:
        return await self._once(call, sync=False)

    def _run_sync(self, call: Call[T]) -> T:
        if in_loop():
            hint = "Await it: `await task.enqueue(app, ...)`, another verb without its .sync()"
            raise NotSupported(f"waiting for {call.verb} inside a running event loop, which would block it,", hint=hint)
        return done(self._once(call, sync=True))

    async def _once(self, call: Call[T], *, sync: bool) -> T:
        from tallybook._db import exactly_once
        from tallybook._db.link import dsn_for_people

        conninfo = self.conninfo()
        connection = partial(self._connect, conninfo, sync=True) if sync else self._connection
        try:
            return await exactly_once.run(connection, call, dsn_for_people(conninfo), sync=sync)
        except psycopg.errors.InvalidSchemaName as error:
            parts = conninfo_to_dict(conninfo)
            database = parts.get("dbname") or os.environ.get("PGDATABASE") or parts.get("user") or "?"
            raise SchemaMissing(str(database)) from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        pool = self._own_pool()
        if pool is None:
            async with self._connect(self.conninfo()) as conn:
                yield conn
            return
        from psycopg_pool import PoolTimeout

        from tallybook._db.link import dsn_for_people

        try:
            conn = await pool.getconn()
        except PoolTimeout as error:
            within = f"within {pool.timeout:g} s"
            reason = f"no connection could be made {within}"
            if pool.get_stats().get("pool_size", 0) >= pool.max_size:
                reason = f"all {pool.max_size} connections of the app's pool were taken {within}"
            raise QueueUnavailable(dsn_for_people(self.conninfo()), reason) from error
        try:
            yield conn
        finally:
            await pool.putconn(conn)

    @asynccontextmanager
    async def _connect(self, conninfo: str, *, sync: bool = False) -> AsyncIterator[Any]:
        conn = await self._opened(conninfo, sync=sync)
        try:
            yield conn
        finally:
            await got(conn.close())

    async def _opened(self, conninfo: str, *, sync: bool) -> Any:
        """Return a new connection of psycopg; `sync`: without waiting (see `got`)."""
        from tallybook._db.link import CONNECT, dsn_for_people
        from tallybook._db.policy import unreached

        library = psycopg.Connection if sync else psycopg.AsyncConnection
        try:
            return await got(library.connect(conninfo, **CONNECT))
        except psycopg.OperationalError as error:
            hint = None
            if not self.dsn and at_node.get() is None and not os.environ.get("TALLYBOOK_DSN"):
                hint = f"Set TALLYBOOK_DSN or the PG* variables, or pass App({self.name!r}, dsn=...)"
            raise QueueUnavailable(dsn_for_people(conninfo), unreached(error), hint=hint) from error


def in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def demand_loop(verb: str) -> None:
    """Raise NotSupported if no event loop runs: the returned coroutine would never be awaited."""
    if not in_loop():
        hint = f"Write .{verb}_sync(...), or await it in an async function"
        raise NotSupported(f"{verb} where no event loop runs", hint=hint)
