"""The heartbeat: a thread and a connection of its own, so that no handler that blocks the event loop costs a lease.

Its session also holds the advisory lock by which the others see at once that this process is gone.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from tallybook._db.link import CONNECT, backoff, dsn_for_people, is_gone
from tallybook._worker.jobs import Book
from tallybook._worker.settings import WorkerSettings

log = logging.getLogger("tallybook.worker")

# Whoever lost his session is looked for by the others: no long backoff here.
_COMES_BACK = 1.0
_START = (
    "select tallybook.worker_start(%s::text, %s::text[], %s::text[], session => %s::boolean, lease => %s::interval),"
    " tallybook._timeline()"
)
_HOLD = "select pg_advisory_lock_shared(1413565443, %s::int)"
_LET_GO = "select pg_advisory_unlock_shared(1413565443, %s::int)"
_STOP = "select tallybook.worker_stop(%s::int)"
# After a failover the server may have lost ends that this worker was told had happened. It must not say that all of its
# claims up to some number are over then: nobody would ever look for what was lost. So the timeline is looked at in the
# same statement, and the worker starts anew on another one; its old self's open attempts are rescued from what is on record.
_RENEW = (
    "select r.job_id, r.reason from tallybook._on_timeline(%s::text)"
    " left join lateral tallybook.renew(%s::int, %s::bigint, %s::bigint[]) r on true where r.job_id is not null"
)


class Heartbeat(threading.Thread):
    """Puts the worker on record and keeps it there. Calls back from its own thread."""

    def __init__(
        self,
        dsn: str,
        settings: WorkerSettings,
        tasks: Sequence[str],
        book: Book,
        *,
        on_cancel: Callable[[int, str | None], object],
        on_given_up: Callable[[int], object],
    ) -> None:
        super().__init__(name="tallybook-heartbeat", daemon=True)
        self._dsn = dsn
        self._settings = settings
        self._tasks = list(tasks)
        self._book = book
        self._on_cancel = on_cancel
        self._on_given_up = on_given_up
        self._conn: psycopg.Connection[Any] | None = None
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._beats_as = 0
        self._timeline = ""
        self._stopping = False
        self.worker_id = 0

    def register(self) -> int:
        """Connect and put the worker on record; once, before the thread starts. Errors are the driver's."""
        conn = self._connect()
        self.worker_id = self._register(conn)
        return self.worker_id

    def _connect(self) -> psycopg.Connection[Any]:
        conn = psycopg.connect(self._dsn, **CONNECT, application_name=f"tallybook {self._settings.name}"[:63])
        conn.prepare_threshold = None
        # A heartbeat may be lost in a crash of the server: so may the worker's whole memory of it.
        # Behind a pooler the session is shared with others: nothing is set on it there.
        if self._settings.notify:
            conn.execute("set statement_timeout = '10s'; set synchronous_commit = off")
        self._conn = conn
        return conn

    def _register(self, conn: psycopg.Connection[Any]) -> int:
        settings = self._settings
        params = (settings.name, list(settings.queues), self._tasks, settings.notify, settings.lease)
        row = conn.execute(_START, params).fetchone()
        assert row is not None
        self._beats_as, self._timeline = row
        self._hold(conn)
        return self._beats_as

    def _hold(self, conn: psycopg.Connection[Any]) -> None:
        if self._settings.notify:  # with a session; behind a pooler there is none to hold it
            conn.execute(_HOLD, (self._beats_as,))

    def beat_now(self) -> None:
        """Do not wait for the next beat."""
        with suppress(OSError):  # it is full: the thread is told already
            self._mouth.send(b".")

    def _wait(self, seconds: float) -> None:
        """Until the time is over, a nudge, or the end of the session: the others see that at once, so must we."""
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
                except psycopg.Error:
                    conn.close()
                    return

    def run(self) -> None:
        """Beat until stopped; comes back after any outage."""
        failures = 0
        while not self._stopping:
            pause = self._settings.heartbeat.total_seconds()
            try:
                if self._conn is None or self._conn.closed:
                    self._hold(self._connect())
                self._beat()
                failures = 0
            except (psycopg.Error, OSError) as error:
                if isinstance(error, psycopg.Error) and error.sqlstate == "TB006":
                    if not self._stopping:  # or it would be on record for ever after its worker_stop
                        self._come_back(error)
                    continue
                if self._conn is not None and is_gone(error, self._conn):
                    self._conn.close()
                failures += 1
                if failures in (2, 10):
                    log.warning("no heartbeat: cannot reach %s: %s", dsn_for_people(self._dsn), str(error).strip())
                pause = min(_COMES_BACK, backoff(failures - 1))
            self._wait(pause)
        if self._conn is not None:
            self._conn.close()

    def _beat(self) -> None:
        assert self._conn is not None
        params = (self._timeline, self._beats_as, self._book.open_from, list(self._book.running))
        for job_id, reason in self._conn.execute(_RENEW, params).fetchall():
            self._on_cancel(job_id, reason)

    def _come_back(self, error: psycopg.Error) -> None:
        """The others gave this worker up (it was stopped, or cut off, for longer than the lease), or the server failed over.

        Start as a new one.
        """
        old = self._beats_as
        log.warning(
            "worker %s is not on record any more, its jobs are others' now; starting again: %s",
            old,
            error.diag.message_primary,
        )
        try:
            assert self._conn is not None
            self._on_given_up(self._register(self._conn))
            # Where the server failed over the old self is on record still: what it left open goes back in line now.
            if self._settings.notify:
                self._conn.execute(_LET_GO, (old,))
            self._conn.execute(_STOP, (old,))
        except (psycopg.Error, OSError) as failure:
            log.warning("cannot start again yet: %s", str(failure).strip())
            self._wait(_COMES_BACK)

    def stop(self) -> None:
        """End the thread and its session."""
        self._stopping = True
        self.beat_now()
