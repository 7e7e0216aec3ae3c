"""The heartbeat: it has its own thread and connection, so that a handler that blocks the event loop loses no lease.

Its session also holds the advisory lock that shows the others at once when this process is gone.
"""

import asyncio
import contextvars
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import metadata
from pathlib import Path

from tallybook._db.declared import Declared
from tallybook._db.driver import Connection, Error, connect
from tallybook._db.link import CONNECT, Link, ThreadSocketTimeout, aside, dsn_for_people
from tallybook._db.migrate import UNDEFINED, refusal
from tallybook._db.policy import Outage, first_line, is_gone
from tallybook._maintenance.services import FOLD
from tallybook._worker.jobs import Book
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")

# The others check on a worker that lost its session, so the backoff is short.
_COMES_BACK = 1.0
# Seconds that an answer may take: a beat that hangs in a dead network leaves time for two others within the lease.
_LEAST_ANSWER, _MOST_ANSWER = 1.0, 5.0
_CHECK_ANSWER = 60.0  # other workers may register or migrate at the same time
_START = Declared("""
  worker_start(name text, queues text[], tasks text[], session boolean, lease interval, catalogue jsonb, slots int[],
               version text)
  -> int""")
_HOLD = "select pg_advisory_lock_shared(1413565443, %s::int)"
_LET_GO = "select pg_advisory_unlock_shared(1413565443, %s::int)"
_STOP = Declared("worker_stop(worker int) -> int")
# After a failover the server may have lost ends that it had confirmed to this worker. So the worker must not report
# that all of its claims up to some id have ended: nobody would look for the lost ones. The same statement checks the
# timeline. On another one the worker starts anew, and its former self's open attempts are rescued as they are stored.
_RENEW = Declared("""
  renew(worker int, open_from bigint, running bigint[], lag interval, memory bigint)
  -> rows (job_id bigint, reason text, attempt int)""")
_BEAT = f"""\
select r.job_id, r.reason, r.attempt
  from tallybook._on_timeline(%s::text) left join lateral {_RENEW.called("order")} r on true
 where r.job_id is not null"""  # noqa: S608


@cache
def version() -> str | None:
    """Return the installed release; None: the package is not installed, only its files are there."""
    try:
        return metadata.version("tallybook")
    except metadata.PackageNotFoundError:
        return None


def memory() -> int | None:
    """Return this process's resident memory in bytes; None without /proc (only Linux has it)."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


@dataclass(eq=False, repr=False)
class Heartbeat:
    """Registers the worker and keeps it registered. Its callbacks run in its own thread.

    `on_fail` is called with the error that ends the thread: the worker must not continue without it.
    """

    _dsn: str
    _settings: WorkerSettings
    _tasks: list[str]
    _catalogue: str
    _book: Book
    session: bool
    on_cancel: Callable[[int, str | None, int | None], object]
    on_given_up: Callable[[int], object]
    on_fail: Callable[[Exception], object]
    lag: Callable[[], float | None]
    worker_id: int = 0
    expected: int = 0
    _conn: Connection | None = None
    _beats_as: int = 0
    _timeline: str = ""
    _stopping: bool = False

    def __post_init__(self) -> None:
        self._answer = min(_MOST_ANSWER, max(_LEAST_ANSWER, self._settings.lease.total_seconds() / 6))
        in_context = partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=in_context, name="tallybook-heartbeat", daemon=True)
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)

    def check(self, checked: Callable[[Connection], int]) -> None:
        """Connect, and keep the schema version that `checked` expects; before `register`, one try as there."""
        conn = self._connect()
        with ThreadSocketTimeout(conn, _CHECK_ANSWER):
            self.expected = checked(conn)

    def register(self) -> None:
        """Register the worker, before the thread starts; one try, which raises the driver's errors."""
        conn = self._connect()
        with ThreadSocketTimeout(conn, 2 * _MOST_ANSWER):
            self.worker_id = self._register(conn)

    def _connect(self) -> Connection:
        if self._conn is not None and not self._conn.closed:
            return self._conn
        conn = connect(self._dsn, **CONNECT, application_name=f"tallybook {self._settings.name}"[:63])
        # A server crash may lose a heartbeat: it may lose everything about this worker.
        # Behind a pooler the session is shared with others, so nothing is set on it there.
        if self.session:
            with ThreadSocketTimeout(conn, self._answer):
                conn.execute("set statement_timeout = '10s'; set synchronous_commit = off")
        self._conn = conn
        return conn

    def _register(self, conn: Connection) -> int:
        settings = self._settings
        params = (
            settings.name, list(settings.queues), self._tasks, self.session, settings.lease, self._catalogue,
            list(settings.queues.values()), version(),
        )  # fmt: skip
        row = conn.execute(f"{_START.worker}, tallybook._timeline()", params).fetchone()
        assert row is not None
        number, timeline = row
        self._hold(conn, number)
        # Set last: with an id that its claimer does not know yet, the thread would beat for nobody.
        self._beats_as, self._timeline = number, timeline
        return self._beats_as

    def _hold(self, conn: Connection, number: int) -> None:
        if self.session:  # behind a pooler there is no session to hold it
            with ThreadSocketTimeout(conn, self._answer):
                conn.execute(_HOLD, (number,))

    def beat_now(self) -> None:
        with suppress(OSError):  # it is full: the thread is woken already
            self._mouth.send(b".")

    def _wait(self, seconds: float) -> None:
        """Wait for the time, a nudge, or the end of the session, which the others see at once."""
        conn, until = self._conn, time.monotonic() + seconds
        watched = select.poll()
        watched.register(self._ear, select.POLLIN)
        if conn is not None and not conn.closed:
            watched.register(conn.fileno(), select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = [number for number, _ in watched.poll(left * 1000)]
            if self._ear.fileno() in ready:
                with suppress(BlockingIOError):
                    self._ear.recv(4096)
                return
            if ready and conn is not None:
                try:
                    conn.pgconn.consume_input()
                except Error:
                    conn.close()
                    return

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            self._beat_until_stopped()
        except Exception as error:
            log.exception("the heartbeat failed")
            with suppress(RuntimeError):  # the worker's loop is closed
                self.on_fail(error)
        finally:
            self._close()

    def _close(self) -> None:
        self._ear.close()
        self._mouth.close()
        if self._conn is not None:
            self._conn.close()

    def _beat_until_stopped(self) -> None:
        # The first failure is silent: a server that was restarted answers the next try.
        outage = Outage(f"no heartbeat, database {dsn_for_people(self._dsn)}", quiet=1, longest=_COMES_BACK)
        while not self._stopping:
            pause = self._settings.heartbeat.total_seconds()
            try:
                if self._conn is None or self._conn.closed:
                    self._hold(self._connect(), self._beats_as)
                self._beat()
                self._look_at_schema(self._conn)
                if outage.failures:
                    outage.over()
            except (Error, OSError) as error:
                if isinstance(error, Error) and error.sqlstate == "TB006":
                    if not self._stopping:  # or it would stay registered forever after its worker_stop
                        self._come_back(error)
                    continue
                pause = outage.failed(error, self._conn)
                if self._conn is not None and is_gone(error, self._conn):
                    self._conn.close()
                elif isinstance(error, Error) and error.sqlstate in UNDEFINED:
                    with suppress(Error):
                        self._look_at_schema(self._conn)
            self._wait(pause)

    def _beat(self) -> None:
        assert self._conn is not None
        lag = self.lag()
        params = (
            self._timeline, self._beats_as, self._book.open_from, list(self._book.running),
            None if lag is None else timedelta(seconds=lag), memory(),
        )  # fmt: skip
        with ThreadSocketTimeout(self._conn, self._answer):
            cancelled = self._conn.execute(_BEAT, params).fetchall()
        for job_id, reason, attempt in cancelled:
            self.on_cancel(job_id, reason, attempt)

    def _look_at_schema(self, conn: Connection | None) -> None:
        """Check one row: a migration may have changed the schema to one that this release cannot work with."""
        if conn is None:
            return
        with ThreadSocketTimeout(conn, self._answer):
            error = refusal(conn, self.expected)
        if error is not None:
            self.on_fail(error)

    def _come_back(self, error: Error) -> None:
        """Register anew after a failover, or when this worker was stopped or cut off for longer than its lease."""
        old = self._beats_as
        message = "worker %s was given up for dead, and others have taken its jobs; starting again: %s"
        log.warning(message, old, error.diag.message_primary)
        try:
            assert self._conn is not None
            with ThreadSocketTimeout(self._conn, 2 * _MOST_ANSWER):
                worker_id = self._register(self._conn)
            self.on_given_up(worker_id)
            # After a failover the old worker is still registered: return its open jobs to their lanes now.
            with ThreadSocketTimeout(self._conn, 2 * _MOST_ANSWER):
                if self.session:
                    self._conn.execute(_LET_GO, (old,))
                self._conn.execute(_STOP.worker, (old,))
        except (Error, OSError) as failure:
            log.warning("cannot start again yet: %s", first_line(failure))
            self._wait(_COMES_BACK)

    async def leave(self, link: Link) -> None:
        """End the thread and deregister the worker over this connection; if that fails, others rescue its jobs."""
        # First: a beat after worker_stop would be refused, and register the worker again.
        self._stopping = True
        self.beat_now()
        if self._thread.ident is not None:
            await aside(self._thread.join, 2.0)
        else:  # stopped before its start
            self._close()
        if not self.worker_id:
            return
        with suppress(Exception):
            async with asyncio.timeout(5):
                conn = await link.connect()
                await conn.execute(_STOP.worker, (self.worker_id,))
                await conn.execute(FOLD.worker, (False,))  # there may be no other worker to do it
