"""The dashboard's own connections: for reads with a time limit, actions in one transaction each, and the doctor."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from tallybook._db import doctor
from tallybook._db.driver import Error, connect
from tallybook._db.link import CONNECT, SocketTimeout, ThreadSocketTimeout, dsn_for_people
from tallybook._db.policy import first_line
from tallybook._db.pooler import LAG, Standby
from tallybook._db.source import Source
from tallybook._db.texts import READER
from tallybook._model.maintenance import Finding
from tallybook.errors import CommitUnknown, QueueUnavailable, TallybookError

Conn = psycopg.AsyncConnection[tuple[Any, ...]]

READ_TIMEOUT = "3s"
"""The time limit of a page's statements: a slow page shows an error and delays nobody else."""
ACTION_TIMEOUT = "30s"
_GRACE = 3.0  # seconds after a statement's time limit that the server has to end it; then the connection is cut
_LONGEST_EXAMINATION = 60.0

IN_THE_WAY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)
"""Errors of lock conflicts: nothing was changed, and another try may succeed."""

_WAIT = 0.02
"""The seconds that a page waits for the doctor. The page shows the findings so far and requests the rest later."""
_PATIENCE = timedelta(seconds=2)  # the time limit of each group of checks, close to that of a page
_GOOD, _LAST_GOOD = 10.0, 60.0  # seconds for which findings are reused, in general and by the overview

# Local to the transaction: no setting stays in a session that a pooler may share.
_LIMITS = """\
select set_config('statement_timeout', %s, true), set_config('lock_timeout', '2s', true),
       set_config('jit', 'off', true), set_config('timezone', 'UTC', true), set_config('datestyle', 'ISO', true),
       set_config('intervalstyle', 'postgres', true)"""
_LIMITS_OF_STANDBY = f"{_LIMITS}, {LAG}"


async def rows(conn: Conn, query: str, *values: Any, **named: Any) -> list[dict[str, Any]]:
    cursor = conn.cursor(row_factory=dict_row)
    return await (await cursor.execute(query.encode(), named or values)).fetchall()


class _Limited(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection that is cut if the server is silent: statement_timeout does not help if the server hangs."""

    longest = 10.0  # seconds for each answer

    async def wait(self, *args: Any, **named: Any) -> Any:
        with SocketTimeout(self, self.longest):
            return await super().wait(*args, **named)


class Database:
    """A small pool that opens at the first request, so that an app mounted without a lifespan also works."""

    def __init__(
        self, source: Source, dsn: str | None, max_size: int, *, is_standby: bool = False, within: float | None = None
    ) -> None:
        """`within` limits the seconds for a connection, by default 5, and for each statement of a reading."""
        self.standby: Standby | None = None  # as of the last reading
        self.reads: Database | None = None  # a standby, if readings go there
        self._source, self._dsn, self._max_size, self._is_standby = source, dsn, max_size, is_standby
        self._wait = 5.0 if within is None else within
        self._answer = None if within is None else f"{within:g}s"
        self._pool: AsyncConnectionPool[_Limited] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.examination = Examination(lambda: self.conninfo)

    @property
    def conninfo(self) -> str:
        """The connection string in use. Raises ConfigError if it is not valid."""
        return self._source.conninfo(self._dsn)

    @property
    def _server(self) -> str:
        return f"{'the standby ' if self._is_standby else ''}{dsn_for_people(self.conninfo)}"

    async def open(self) -> AsyncConnectionPool[_Limited]:
        """Return the pool of this event loop. It connects in the background: an unreachable server is no error yet."""
        pool, loop = self._pool, asyncio.get_running_loop()
        if pool is None or self._loop is not loop:
            pool = AsyncConnectionPool(
                self.conninfo,
                connection_class=_Limited,
                min_size=0,
                max_size=self._max_size,
                timeout=self._wait,
                open=False,
                name=f"tallybook web {self._source.name}",
                kwargs={**CONNECT, "context": READER},
            )
            self._pool, self._loop = pool, loop
        await pool.open()  # does nothing if it is open
        return pool

    async def close(self) -> None:
        if self.reads is not None:
            await self.reads.close()
        pool, self._pool = self._pool, None
        if pool is not None and self._loop is asyncio.get_running_loop():
            await pool.close()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Conn]:
        """Yield a connection in a read-only transaction with one snapshot. QueueUnavailable if none is available."""
        if self.reads is not None:
            async with self.reads.read() as conn:
                self.standby = self.reads.standby
                yield conn
            return
        async with self._transaction(self._answer or READ_TIMEOUT, "isolation level repeatable read read only") as conn:
            yield conn

    @asynccontextmanager
    async def act(self, verb: str | None, timeout: str = ACTION_TIMEOUT) -> AsyncIterator[Conn]:
        """Yield a connection in a transaction that may write. It commits at the end or changes nothing.

        Raises CommitUnknown, which names `verb`, if the connection is lost at the commit; without it, QueueUnavailable.
        """
        complete = False
        try:
            async with self._transaction(timeout, "isolation level read committed read write") as conn:
                yield conn
                complete = True
        except QueueUnavailable as error:
            if complete and verb is not None:
                raise CommitUnknown(verb, error.server or "") from error
            raise

    @asynccontextmanager
    async def _transaction(self, timeout: str, mode: str) -> AsyncIterator[Conn]:
        pool = await self.open()
        try:
            conn = await pool.getconn()
        except PoolTimeout as error:
            raise QueueUnavailable(self._server, f"no connection within {self._wait:g} s") from error
        conn.longest = float(timeout.removesuffix("s")) + _GRACE
        try:
            async with conn.transaction():
                await conn.execute(f"set transaction {mode}".encode())
                found = await conn.execute(_LIMITS_OF_STANDBY if self._is_standby else _LIMITS, (timeout,))
                if self._is_standby:
                    self.standby = Standby(*(await found.fetchone() or ())[-3:])
                yield conn
        except psycopg.OperationalError as error:
            if conn.broken or conn.closed:
                raise QueueUnavailable(self._server, f"the connection was lost: {first_line(error)}") from error
            raise
        finally:
            await pool.putconn(conn)


class Examination:
    """The doctor in its own thread, one run at a time for all viewers. No page waits for a slow check."""

    def __init__(self, conninfo: Callable[[], str]) -> None:
        self._conninfo = conninfo
        self._looking: asyncio.Task[None] | None = None
        self._found: list[Finding] = []
        self._whole: list[Finding] = []
        self._ended = float("-inf")
        self.runs = 0

    async def look(self, wait: float = _WAIT) -> tuple[list[Finding], bool]:
        """Return the findings, at most 10 s old, and whether they are complete, after at most `wait` seconds."""
        looking = self._look(_GOOD)
        await asyncio.wait((looking,), timeout=wait)
        return list(self._found), looking.done()

    def last(self) -> list[Finding]:
        """Return the findings of the last run, none before the first. Starts a new run if it is older than a minute."""
        self._look(_LAST_GOOD)
        return self._whole

    def _look(self, good: float) -> asyncio.Task[None]:
        looking = self._looking
        if looking is None or (looking.done() and time.monotonic() - self._ended >= good):
            self._found = []
            self.runs += 1
            looking = self._looking = asyncio.create_task(asyncio.to_thread(self._run), name="tallybook doctor")
        return looking

    def _run(self) -> None:
        try:
            with (
                connect(self._conninfo(), **CONNECT, application_name="tallybook web doctor") as conn,
                ThreadSocketTimeout(conn, _LONGEST_EXAMINATION),
            ):
                for one in doctor.examine(conn, patience=_PATIENCE):
                    self._found.append(one)
        except (Error, TallybookError, OSError) as error:
            where = ""
            with suppress(TallybookError):
                where = f" {dsn_for_people(self._conninfo())}"
            text = f"the doctor has no connection to the database{where}: {type(error).__name__}"
            advice = "Check whether the server is up and has a free connection."
            self._found.append(Finding(name="connection", level="problem", finding=text, advice=advice))
        finally:
            self._whole, self._ended = list(self._found), time.monotonic()
