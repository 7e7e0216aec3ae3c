"""Transactions for atomic tasks, one small class per library: begin, commit, roll back, keep or drop the connection.

SET LOCAL marks each transaction at its start; a COMMIT or ROLLBACK by the handler removes the mark: see _atomic.sql.
The mark is not a query, so the handler may still set the isolation level. Nothing else is set on it.

Connections in good state are kept for the next job. They have no limit of their own: there are as many as running
atomic tasks, which the worker's slots limit. Otherwise transactions abandoned by a time-out would use up the limit and
block.
"""

import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from tallybook._db.link import CONNECT
from tallybook._db.policy import is_gone
from tallybook._db.pooler import KEEPALIVES, ask_asyncpg, make_fit
from tallybook._db.sync import chain, got, state_of
from tallybook.errors import TransactionError

MARK = "set local tallybook.atomic = on"
_BEGIN = "begin; set local tallybook.atomic = on"
# Session settings of one job must not affect the next one.
RESET = (
    "reset session authorization; reset all; close all; unlisten *; discard temp;"
    f" select pg_advisory_unlock_all(); {KEEPALIVES}"
)


@dataclass(slots=True)
class Begun:
    """An open transaction: the object for the handler, and the object to end it on."""

    given: Any
    handle: Any
    driver: Any = None  # a connection that another thread may cancel


class Library(Protocol):
    """Transactions of one library. A synchronous one never waits (see `got`): all but `close` runs in its thread."""

    async def begin(self) -> Begun: ...

    async def flush(self, begun: Begun) -> None:
        """Send what the library still holds back: most send everything at once."""
        return None

    async def commit(self, begun: Begun) -> None: ...
    async def rollback(self, begun: Begun) -> None: ...
    async def keep(self, begun: Begun) -> None: ...
    async def drop(self, begun: Begun) -> None: ...
    async def close(self) -> None: ...


def gone(error: BaseException) -> bool:
    """Whether this is a library's error for a lost connection or server."""
    for inner in chain(error):
        if is_gone(inner) or (state_of(inner) or "").startswith(("08", "57P", "53")):
            return True
        if type(inner).__module__.startswith("asyncpg") and type(inner).__name__ == "InterfaceError":
            return True  # "connection is closed"
    return False


def conflicts(error: BaseException) -> bool:
    """Whether the server has ended a transaction because of another one; a retry is likely to succeed."""
    return _state(error) in ("40001", "40P01")


def interrupted(error: BaseException) -> bool:
    """Whether a statement was cancelled."""
    return _state(error) == "57014"


def _state(error: BaseException) -> str | None:
    return next(filter(None, map(state_of, chain(error))), None)


def own_to_commit(what: str) -> TransactionError:
    """Return the error for a handler that tries to end its transaction."""
    return TransactionError(
        f"the handler of an atomic task called {what}",
        detail="Its transaction commits when the handler returns, together with the job's end,"
        " and rolls back when it raises",
        hint="Use a savepoint inside it, or a task that is not atomic",
    )


class _Open:
    """A connection whose transaction the worker ends, not the handler."""

    def commit(self) -> Any:
        raise own_to_commit("commit()")

    def rollback(self) -> Any:
        raise own_to_commit("rollback()")


class GivenAsync(_Open, psycopg.AsyncConnection[Any]): ...


class Given(_Open, psycopg.Connection[Any]): ...


class _Idle:
    """Connections that wait for the next job. After close none is kept."""

    def __init__(self) -> None:
        self._conns: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Any:
        with self._lock:
            return self._conns.pop() if self._conns else None

    def put(self, conn: Any) -> bool:
        with self._lock:
            if not self._closed:
                self._conns.append(conn)
            return not self._closed

    def close(self) -> list[Any]:
        with self._lock:
            self._closed = True
            conns, self._conns = self._conns, []
            return conns


class Psycopg(Library):
    def __init__(self, given: type[GivenAsync | Given], dsn: str, name: str) -> None:
        self._given, self._dsn, self._options = given, dsn, {**CONNECT, "application_name": name}
        self._idle = _Idle()

    async def begin(self) -> Begun:
        while (conn := self._idle.take()) is not None:
            try:
                await got(conn.execute(_BEGIN))
                return Begun(conn, conn, conn)
            except psycopg.Error as error:
                await got(conn.close())
                if not gone(error):
                    raise
        conn = await got(self._given.connect(self._dsn, **self._options))
        try:
            await make_fit(conn)
            await got(conn.execute(_BEGIN))
        except BaseException:
            await got(conn.close())
            raise
        return Begun(conn, conn, conn)

    async def commit(self, begun: Begun) -> None:
        await got(super(_Open, begun.handle).commit())  # type: ignore[misc]

    async def rollback(self, begun: Begun) -> None:
        await got(super(_Open, begun.handle).rollback())  # type: ignore[misc]

    async def keep(self, begun: Begun) -> None:
        conn = begun.handle
        await got(conn.execute(RESET))
        conn.row_factory = tuple_row
        conn.cursor_factory = psycopg.Cursor if isinstance(conn, Given) else psycopg.AsyncCursor
        if not self._idle.put(conn):
            await got(conn.close())

    async def drop(self, begun: Begun) -> None:
        await got(begun.handle.close())

    async def close(self) -> None:
        for conn in self._idle.close():
            await got(conn.close())


class Asyncpg(Library):
    def __init__(self, dsn: str, name: str) -> None:
        self._url, self._options = asyncpg_url(dsn), {"timeout": 10, "server_settings": {"application_name": name}}
        self._idle = _Idle()

    async def begin(self) -> Begun:
        import asyncpg

        while (conn := self._idle.take()) is not None:
            try:
                return await self._begun(conn)
            except Exception as error:
                conn.terminate()
                if not gone(error):
                    raise
        conn = await asyncpg.connect(self._url, **self._options)
        try:
            if "statement_cache_size" not in self._options and not await ask_asyncpg(conn):
                await conn.close()
                self._options["statement_cache_size"] = 0
                conn = await asyncpg.connect(self._url, **self._options)
            return await self._begun(conn)
        except BaseException:
            conn.terminate()
            raise

    async def _begun(self, conn: Any) -> Begun:
        # asyncpg's own way: it refuses conn.transaction() inside a transaction that a statement has begun.
        transaction = conn.transaction()
        await transaction.start()
        await conn.execute(MARK)
        return Begun(conn, transaction)

    async def commit(self, begun: Begun) -> None:
        await begun.handle.commit()

    async def rollback(self, begun: Begun) -> None:
        await begun.handle.rollback()

    async def keep(self, begun: Begun) -> None:
        await begun.given.execute(RESET)
        if not self._idle.put(begun.given):
            await begun.given.close(timeout=5)

    async def drop(self, begun: Begun) -> None:
        begun.given.terminate()

    async def close(self) -> None:
        for conn in self._idle.close():
            conn.terminate()


class Django(Library):
    """A Django connection, inside `transaction.atomic()`. Django keeps a connection per thread, by its own settings."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    async def begin(self) -> Begun:
        from django.db import connections, transaction

        conn = connections[self._alias]
        conn.close_if_unusable_or_obsolete()
        atomic = transaction.atomic(using=self._alias, durable=True)
        atomic.__enter__()
        try:
            with conn.cursor() as cursor:
                cursor.execute(MARK)
        except BaseException as error:
            with suppress(Exception):
                atomic.__exit__(type(error), error, None)
            conn.close()
            raise
        return Begun(conn, atomic, conn.connection)

    async def commit(self, begun: Begun) -> None:
        begun.handle.__exit__(None, None, None)

    async def rollback(self, begun: Begun) -> None:
        error = RuntimeError("rolled back")  # the argument for `atomic`, which checks only the type
        begun.handle.__exit__(type(error), error, None)

    async def keep(self, begun: Begun) -> None:
        begun.given.close_if_unusable_or_obsolete()

    async def drop(self, begun: Begun) -> None:
        begun.given.close()  # first: then leaving the block, without which Django never reconnects, sends nothing
        if begun.given.in_atomic_block:
            await self.rollback(begun)

    async def close(self) -> None:
        """Nothing to do: the connections are Django's."""


# The keys that asyncpg reads from a URL; it treats all others as settings of the server.
_ASYNCPG = (
    "host", "port", "dbname", "user", "password", "passfile", "service", "sslmode", "sslcert", "sslkey", "sslrootcert",
    "sslcrl", "sslpassword", "sslnegotiation", "ssl_min_protocol_version", "ssl_max_protocol_version",
    "target_session_attrs", "krbsrvname", "options",
)  # fmt: skip


def asyncpg_url(dsn: str) -> str:
    """Return a libpq connection string as a URL for asyncpg, with several hosts, sockets, TLS files and settings."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items() if value is not None}
    # asyncpg compares the certificate with the host that it connects to: with verify-full this must be the name.
    verify = (given.get("sslmode") or os.environ.get("PGSSLMODE")) == "verify-full"
    if "hostaddr" in given and not (verify and given.get("host")):
        given["host"] = given["hostaddr"]
    hosts, ports = given.get("host", "").split(","), given.get("port", "").split(",")
    if ports != [""]:  # libpq takes one port for all hosts, and none for the default
        ports = ports * len(hosts) if len(ports) == 1 else ports
        given["port"] = ",".join(port or "5432" for port in ports)
    return "postgresql://?" + urlencode({name: value for name, value in given.items() if name in _ASYNCPG})
