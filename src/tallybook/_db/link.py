"""A connection that comes back: every statement of a worker goes through one.

All verbs of a worker may be said twice (they name the lease), so what fails with the connection is said again on a new
one. The table of reliability.md, section 8, in one place: gone connections and lacking resources are waited out with
jittered backoff, contention is tried again at once a few times, everything else is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from tallybook.errors import QueueUnavailable, from_sqlstate

T = TypeVar("T")
log = logging.getLogger("tallybook.db")

# Keepalives find a dead peer in about 25 s when nothing is sent, tcp_user_timeout in 15 s when something is.
CONNECT: dict[str, Any] = {
    "autocommit": True,
    "client_encoding": "utf8",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}

# Settings that a role or a database may have and that no statement of a worker can live with.
SESSION = """\
select set_config(s.name, v.value, false)
  from (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'), ('idle_session_timeout', '0'),
               ('idle_in_transaction_session_timeout', '10s'), ('default_transaction_isolation', 'read committed'),
               ('default_transaction_read_only', 'off'), ('datestyle', 'ISO'), ('intervalstyle', 'postgres')) v(name, value)
  join pg_settings s on lower(s.name) = v.name"""

_CONTENTION = (pg.SerializationFailure, pg.DeadlockDetected, pg.LockNotAvailable, pg.QueryCanceled)
_RESOURCES = ("53", "57P03", "25006", "25P03")


def is_gone(error: BaseException, conn: Any = None) -> bool:
    """Whether this error says that the connection or the server is not there (any more)."""
    if isinstance(error, psycopg.Error):
        state = error.sqlstate
        if state is None:
            return isinstance(error, psycopg.OperationalError) or bool(conn is not None and conn.closed)
        if state in ("57014",):
            return False
        return state.startswith(("08", "57P", "58", *_RESOURCES)) or bool(conn is not None and conn.closed)
    return isinstance(error, OSError)


def is_final(error: BaseException) -> bool:
    """Whether waiting will not help: a wrong password, database or host name in the DSN."""
    state = getattr(error, "sqlstate", None)
    if state:
        return str(state).startswith(("28", "3D", "0P"))
    text = str(error)
    return any(part in text for part in ("password authentication failed", "no password supplied", "does not exist"))


def dsn_for_people(dsn: str) -> str:
    """The DSN without its password, for messages."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "the given DSN"
    shown = " ".join(f"{key}={parts[key]}" for key in ("host", "port", "dbname", "user") if parts.get(key))
    return shown or "the server of the PG* variables"


def backoff(failures: int) -> float:
    """Seconds until the next try to connect: 0.1 to 10, full jitter on the upper half."""
    most: float = min(10.0, 0.1 * 2 ** min(failures, 10))
    return most * random.uniform(0.5, 1.0)


class Link:
    """One asyncio connection that is made again whenever it is lost; one statement at a time."""

    def __init__(
        self,
        dsn: str,
        name: str,
        *,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.dsn = dsn
        self.name = name
        self.conn: psycopg.AsyncConnection[tuple[Any, ...]] | None = None
        self._on_connect = on_connect
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self.giving_up = asyncio.Event()
        """Set by a stop: what cannot reach the server now raises instead of waiting."""

    async def connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        """The connection, a new one if there is none; a single try, errors are the driver's."""
        if self.conn is not None and not self.conn.closed:
            return self.conn
        conn = await psycopg.AsyncConnection.connect(
            self.dsn, **CONNECT, application_name=f"tallybook {self.name}"[:63]
        )
        conn.prepare_threshold = 2
        try:
            # Users' roles may have timeouts that a worker must not die of; its own transactions never stay open.
            await conn.execute(SESSION)
            if self._on_connect:
                await self._on_connect(conn)
        except BaseException:
            await self._drop(conn)
            raise
        self.conn = conn
        return conn

    async def first(self) -> None:
        """Connect while starting: waits for a server that is not up, raises QueueUnavailable for a DSN that is wrong."""
        failures = 0
        while True:
            try:
                await self.connect()
                return
            except (psycopg.Error, OSError) as error:
                if isinstance(error, psycopg.ProgrammingError) or is_final(error):
                    raise QueueUnavailable(dsn_for_people(self.dsn), str(error).strip()) from error
                if not is_gone(error):
                    raise
                failures += 1
                if failures in (1, 10):
                    log.warning("cannot reach %s: %s; waiting for it", dsn_for_people(self.dsn), _first_line(error))
                await self._pause(backoff(failures), error)

    async def run(self, call: Callable[[psycopg.AsyncConnection[tuple[Any, ...]]], Awaitable[T]]) -> T:
        """What `call` returns on this connection; said again on a new one for as long as connections fail.

        Contention (40001, 40P01, 55P03, 57014) is tried five times. The server's TB errors come as Tallybook's.
        """
        failures = contention = 0
        while True:
            try:
                async with self._lock:
                    return await call(await self.connect())
            except _CONTENTION:
                contention += 1
                if contention >= 5:
                    raise
                await asyncio.sleep(backoff(0))
            except (psycopg.Error, OSError) as error:
                if not is_gone(error, self.conn):
                    raise own(error) from error
                await self._lost(error, failures)
                failures += 1

    async def _lost(self, error: BaseException, failures: int) -> None:
        if self.conn is not None:
            await self._drop(self.conn)
        if failures in (1, 10):  # the first try on a new connection is silent: a restarted server answers it
            log.warning("lost %s: %s; trying again", dsn_for_people(self.dsn), _first_line(error))
        await self._pause(backoff(failures) if failures else 0, error)

    async def _pause(self, seconds: float, error: BaseException) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.giving_up.wait()
        if self.giving_up.is_set():
            raise QueueUnavailable(dsn_for_people(self.dsn), _first_line(error)) from error

    async def close(self) -> None:
        """Close it for good."""
        self.giving_up.set()
        if self.conn is not None:
            await self._drop(self.conn)

    async def _drop(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        if conn is self.conn:
            self.conn = None
        if self._on_close:
            self._on_close()
        await conn.close()


def own(error: BaseException) -> BaseException:
    """The Tallybook error for what one of its functions raised, else the error itself."""
    if isinstance(error, psycopg.Error) and (error.sqlstate or "").startswith("TB"):
        found = from_sqlstate(
            error.sqlstate or "", error.diag.message_primary or "", error.diag.message_detail, error.diag.message_hint
        )
        return found or error
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
