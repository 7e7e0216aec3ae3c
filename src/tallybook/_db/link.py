"""A connection that reconnects: every statement of a worker uses one.

All verbs of a worker may run twice (they name the lease). So a statement that fails with its connection is sent again
on a new one, without a time limit. policy.py classifies the errors.

An answer has a time limit, for peers that are silent but not gone: TCP's own time-outs (CONNECT) do not detect a proxy,
a pooler or a NAT that keeps the socket but drops its data. Cancelling the waiting coroutine would not help either:
psycopg then asks the server over another connection to cancel the statement, and waits for that. So the socket is shut
down, as if the peer had done it.

A call that may hang would block one of asyncio's few threads. Its own thread keeps neither the loop nor the process
alive. A caller that stops waiting cancels and leaves it behind.
"""

import asyncio
import contextvars
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar

import psycopg

from tallybook._db.policy import Action, Outage, action_for, backoff, first_line, is_final, is_gone
from tallybook._db.sync import refusal
from tallybook.errors import QueueUnavailable

T = TypeVar("T")

# Keepalives find a dead peer in about 25 s when nothing is sent, tcp_user_timeout in 15 s when something is.
# Behind a pooler in transaction mode, each transaction may run in another session: only who knows better prepares.
CONNECT: dict[str, Any] = {
    "autocommit": True, "client_encoding": "utf8", "connect_timeout": 10, "keepalives_idle": 10,
    "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 15_000,
    "prepare_threshold": None,
}  # fmt: skip

# Settings of a role or a database that would break a worker's statements. If the session is not the one that this
# connection opened, nothing is set and no row is returned: see pooler.py.
SESSION = """\
select set_config(s.name, v.value, false)
  from (values ('statement_timeout', '0'), ('lock_timeout', '0'), ('transaction_timeout', '0'),
               ('idle_session_timeout', '0'), ('idle_in_transaction_session_timeout', '10s'),
               ('default_transaction_isolation', 'read committed'), ('default_transaction_read_only', 'off'),
               ('datestyle', 'ISO'), ('intervalstyle', 'postgres')) v(name, value)
  join pg_settings s on lower(s.name) = v.name
 where pg_backend_pid() = %s::int"""

_AT_ONCE = 5
# A migration is running: a function, or its result, was replaced between two steps of one statement. Retried only a
# few times, because these codes have permanent causes, too.
_REPLACED = ("XX000", "0A000")
_COMES_BACK = (Action.RECONNECT, Action.WAIT, Action.AGAIN)
# A verb without an answer by then is sent again on a new connection. It may only be slow, so the next limit is longer.
_ANSWER, _LONGEST_ANSWER = 30.0, 600.0
_CANCEL_AGAIN = 1.0
_ON_CONNECT = 120.0  # it may rebase the lanes after a move; if that takes longer, the next connection finds it done


def dsn_for_people(dsn: str) -> str:
    """Return the DSN without its password, for messages."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "the given DSN"
    shown = " ".join(f"{key}={parts[key]}" for key in ("host", "port", "dbname", "user") if parts.get(key))
    return shown or "the server of the PG* variables"


def daemon(call: Callable[..., T], *args: Any, name: str = "tallybook-aside") -> Future[T]:
    """Run the call in a daemon thread, with a copy of this context."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(call, *args))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


async def aside(call: Callable[..., T], *args: Any) -> T:
    """Return the call's result, or raise its error, from a daemon thread with a copy of this context."""
    return await asyncio.wrap_future(daemon(call, *args))


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks until all have ended; ignore their errors.

    One cancel may not be enough: psycopg 3.2 waits with `asyncio.wait_for`, and in Python 3.11 this loses a cancel that
    comes together with the server's answer.
    """
    left = list(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, pending = await asyncio.wait(left, timeout=_CANCEL_AGAIN)
        await asyncio.gather(*ended, return_exceptions=True)
        left = list(pending)


class NoAnswer(psycopg.OperationalError):
    """The peer was silent for too long; the connection was cut."""


def cut(conn: Any) -> None:
    """Shut down both directions of this connection's socket; waiting calls find it closed."""
    with suppress(psycopg.Error, OSError, ValueError), socket.socket(fileno=os.dup(conn.pgconn.socket)) as same:
        same.shutdown(socket.SHUT_RDWR)


class _Limit:
    __slots__ = ("_conn", "_seconds", "_timer", "passed")

    _timer: asyncio.TimerHandle | threading.Timer

    def __init__(self, conn: Any, seconds: float) -> None:
        self._conn = conn
        self._seconds = seconds
        self.passed = False

    def _cut(self) -> None:
        self.passed = True
        cut(self._conn)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._timer.cancel()
        if self.passed and isinstance(error, psycopg.Error | OSError):
            raise NoAnswer(f"no answer within {self._seconds:g} s") from error


class SocketTimeout(_Limit):
    """`with SocketTimeout(conn, 5.0): await ...`: cut the connection after the given seconds, and raise NoAnswer."""

    __slots__ = ("_due",)

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._seconds
        self._timer = loop.call_at(self._due, self._over)
        return self

    def _over(self) -> None:
        # Late by more than a second: the loop was blocked. The answer may already be there.
        if asyncio.get_running_loop().time() > self._due + 1.0:
            self.__enter__()
        else:
            self._cut()


class ThreadSocketTimeout(_Limit):
    """The same for a synchronous connection in a thread."""

    def __enter__(self) -> Self:
        self._timer = threading.Timer(self._seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()
        return self


class Link:
    """One asyncio connection that is reopened whenever it is lost; one statement at a time."""

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
        self.pooled = False  # whether there is a pooler in transaction mode; known after the first connection
        self._on_connect = on_connect
        self._on_close = on_close
        self._lock = asyncio.Lock()
        self._server = dsn_for_people(dsn)
        # The first retry on a new connection is not logged: a restarted server answers it.
        self._outage = Outage(f"database {self._server}", quiet=1)
        self._answer = _ANSWER
        self.errors = 0  # the number of lost connections and failed tries to connect
        self.giving_up = asyncio.Event()  # set by a stop: a call that cannot reach the server raises instead of waiting

    async def connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        """Return the connection, a new one if there is none. Tries once; errors are the driver's."""
        if self.conn is not None and not self.conn.closed:
            return self.conn
        name = f"tallybook {self.name}"[:63]
        conn = await psycopg.AsyncConnection.connect(self.dsn, **CONNECT, application_name=name)
        try:
            with SocketTimeout(conn, 10.0):
                # Users' roles may have timeouts that would break a worker; its own transactions never stay open.
                found = await conn.execute(SESSION, (conn.info.backend_pid,))
                self.pooled = found.rowcount == 0
                if not self.pooled:
                    conn.prepare_threshold = 2
            if self._on_connect:
                with SocketTimeout(conn, _ON_CONNECT):
                    await self._on_connect(conn)
        except BaseException:
            await self._drop(conn)
            raise
        self.conn = conn
        return conn

    async def first(self) -> None:
        """Connect at the start: wait for a server that is down. Raises QueueUnavailable for a wrong DSN."""
        outage = Outage(f"cannot reach {self._server}, waiting for it")
        while True:
            try:
                await self.connect()
                outage.over()
                return
            except (psycopg.Error, OSError) as error:
                if isinstance(error, psycopg.ProgrammingError) or is_final(error):
                    raise QueueUnavailable(self._server, str(error).strip()) from error
                if not is_gone(error):
                    raise
                await self._pause(max(0.05, outage.failed(error)), error)

    async def until(self, what: Callable[[], T]) -> T:
        """Return the result of `what`, run in a thread with its own connection; retried while there is no server."""
        while True:
            try:
                found = await aside(what)
            except (psycopg.Error, OSError) as error:
                if action_for(error) not in _COMES_BACK:
                    raise refusal(error) or error from error
                await self._pause(self._outage.failed(error), error)
            else:
                self._outage.over()
                return found

    async def run(self, call: Callable[[psycopg.AsyncConnection[tuple[Any, ...]]], Awaitable[T]]) -> T:
        """Return the result of `call` on this connection; retried, if needed on a new one, until the server answers.

        Contention (40001, 40P01, 55P03, 57014) is retried five times at once and then with backoff, like other
        temporary errors. TB errors of the server are raised as Tallybook's; all others unchanged.
        """
        contention = 0
        while True:
            try:
                async with self._lock:
                    conn = await self.connect()
                    with SocketTimeout(conn, self._answer) as limit:
                        said = await call(conn)
            except (psycopg.Error, OSError) as error:
                action = action_for(error, self.conn)
                if getattr(error, "sqlstate", None) in _REPLACED and contention < _AT_ONCE:
                    contention += 1
                    await self._lost(error, Action.RECONNECT)
                elif action is Action.AGAIN and contention < _AT_ONCE:
                    contention += 1
                    await asyncio.sleep(backoff(0))
                elif action in _COMES_BACK:
                    await self._lost(error, action)
                else:
                    raise refusal(error) or error from error
            else:
                if self._outage.failures:
                    self._outage.over()
                if not limit.passed:
                    self._answer = _ANSWER
                return said

    async def rows(self, sql: str, *params: object) -> list[Any]:
        """Return the rows of one statement, as `run` does."""

        async def call(conn: psycopg.AsyncConnection[Any]) -> list[Any]:
            return await (await conn.execute(sql, params)).fetchall()

        return await self.run(call)

    async def _lost(self, error: BaseException, action: Action) -> None:
        pause = self._outage.failed(error, self.conn)
        if self.conn is not None and (action is Action.RECONNECT or self.conn.closed):
            if isinstance(error, NoAnswer):
                self._answer = min(2 * self._answer, _LONGEST_ANSWER)
            await self._drop(self.conn)
        await self._pause(pause, error)

    @property
    def away(self) -> bool:
        """Whether the last try has failed."""
        return self._outage.failures > 0

    async def _pause(self, seconds: float, error: BaseException) -> None:
        self.errors += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.giving_up.wait()
        if self.giving_up.is_set():
            raise QueueUnavailable(self._server, first_line(error)) from error

    def cut(self) -> None:
        """Stop waiting for answers: a call in progress fails and is not retried."""
        self.giving_up.set()
        if self.conn is not None and self._lock.locked():
            cut(self.conn)

    async def close(self) -> None:
        self.giving_up.set()
        if self.conn is not None:
            await self._drop(self.conn)

    async def _drop(self, conn: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        if conn is self.conn:
            self.conn = None
        if self._on_close:
            self._on_close()
        await conn.close()
