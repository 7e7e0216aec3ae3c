"""A worker's own HTTP endpoint: /metrics, /healthz and /readyz. It exists only if a port was set.

It has its own thread and event loop. So it still answers, and reports it, when a handler blocks the worker's loop, and
its clients cost that loop nothing. It reads the worker's numbers and never changes anything.

It supports only the HTTP that a scraper and a probe need: one GET or HEAD per connection, without a body, with limits
on size, time and connections.
"""

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Protocol, TypeAlias

from tallybook._db.driver import Error
from tallybook._db.link import Link, SocketTimeout, aside
from tallybook._db.numbers import ANSWER, CONTENT_TYPE, Asked, Numbers, Sample, Shown, ask, of_nodes, of_the_database
from tallybook._db.numbers import text as exposition
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.finish.finisher import Finisher
from tallybook._worker.jobs import Book
from tallybook._worker.life.heartbeat import version
from tallybook._worker.life.watchdog import Watchdog
from tallybook._worker.run.runner import Runner
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ConfigError

log = logging.getLogger("tallybook.worker")

BLOCKED = 5.0
"""Seconds after which a loop that has not turned counts as dead."""
_LOOK = 0.5
_MOST_BYTES = 8192
_MOST_CONNECTIONS = 32
_READ, _WORK, _WRITE = 5.0, 15.0, 5.0  # _WORK: longer than the database's limit
_HEADER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_REQUEST = re.compile(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.([01])")
_ENDS = ("completed", "scheduled", "available", "cancelled", "dead", "moved", "refused")


class ShownWorker(Protocol):
    """A Worker, as its endpoint reads it."""

    settings: WorkerSettings
    book: Book
    claimer: Claimer
    runner: Runner
    finisher: Finisher
    links: dict[str, Link]
    watchdog: Watchdog | None

    def why_not_ready(self) -> str: ...


Nodes: TypeAlias = Mapping[str, tuple[str, ShownWorker | None]]


# Called from another thread than the loop's: each of these is one read of a number, or an atomic copy.


def of_the_process(worker: ShownWorker) -> dict[str, list[Sample]]:
    """Return the metrics that the workers of one process share."""
    slots, free = worker.settings.queues, dict(worker.book.free)
    return {
        "tallybook_worker_slots": [((queue,), float(n)) for queue, n in slots.items()],
        "tallybook_worker_slots_used": [((queue,), float(n - free[queue])) for queue, n in slots.items()],
        "tallybook_worker_loop_blocked_total": [((), float(worker.watchdog.blocked if worker.watchdog else 0))],
    }


def of_the_node(worker: ShownWorker) -> dict[str, list[Sample]]:
    """Return a worker's counts for its database."""
    ends, links = dict(worker.finisher.counts), worker.links
    return {
        "tallybook_worker_jobs_claimed_total": [((), float(worker.claimer.claimed))],
        "tallybook_worker_attempts_ended_total": [((end,), float(ends.get(end, 0))) for end in sorted({*_ENDS, *ends})],
        "tallybook_worker_ends_waiting": [((), float(worker.finisher.waiting))],
        "tallybook_worker_handlers_abandoned": [((), float(worker.runner.still_abandoned))],
        "tallybook_worker_connection_errors_total": [((what,), float(link.errors)) for what, link in links.items()],
    }


class _Refused(Exception):
    """The request cannot be answered: the status, and the reason."""


class Database:
    """The database's numbers, over a connection that is opened when they are first asked for."""

    def __init__(self, dsn: str, name: str) -> None:
        self._link = Link(dsn, name)
        self.numbers = Asked(self._answer).now
        """Returns numbers that are at most a second old; None: the database is away."""

    async def _answer(self, *, again: bool = True) -> Numbers:
        kept = self._link.conn is not None
        try:
            async with asyncio.timeout(ANSWER):
                conn = await self._link.connect()
            with SocketTimeout(conn, ANSWER):
                return await ask(conn)
        except (Error, OSError):
            await self.close()
            self._link = Link(self._link.dsn, self._link.name)
            if kept and again:  # a server that was restarted answers the next try
                return await self._answer(again=False)
            raise

    async def close(self) -> None:
        await self._link.close()


class Telemetry(threading.Thread):
    """Listens while it is entered. `worker` is None while the process still waits for the server.

    A worker of several nodes passes `nodes`, which returns the address of each, and its worker if it has one now. Then
    each node's metrics have its name as the label `node`. It is ready while any node is. A node that is away is named,
    and delays a scrape by its time limit at most.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        dsn: str,
        worker: ShownWorker | None = None,
        *,
        nodes: Callable[[], Nodes] | None = None,
    ) -> None:
        super().__init__(name="tallybook-telemetry", daemon=True)
        self._settings = settings
        self._has_nodes = nodes is not None
        self._nodes: Callable[[], Nodes] = nodes or (lambda: {"": (dsn, worker)})
        self._databases: dict[str, tuple[str, Database, Shown]] = {}
        self._lag = 0.0
        self._asked: float | None = None
        self._connections = 0
        self.port = 0

    async def __aenter__(self) -> None:
        """Bind the port, in the worker's own loop; raises ConfigError if that fails."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        assert port is not None
        self._watched = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)
        except (OSError, UnicodeError) as error:
            raise ConfigError("metrics_port", f"{host}:{port}", f"cannot be listened on: {error}") from error
        self.port = self._socket.getsockname()[1]
        self._own = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        log.info("metrics and probes on http://%s:%s", f"[{host}]" if ":" in host else host, self.port)
        self.start()

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._own) as runner:
            runner.run(self._serve())

    async def __aexit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # its loop has ended already
            self._own.call_soon_threadsafe(self._closing.set)
        await aside(self.join, ANSWER)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=_MOST_BYTES)
        watching = asyncio.create_task(self._watch())
        await self._closing.wait()
        server.close()
        watching.cancel()
        for _, database, _ in self._databases.values():
            await database.close()

    async def _watch(self) -> None:
        while True:
            if self._asked is None:
                self._asked = time.monotonic()
                with suppress(RuntimeError):  # closed: it will not answer
                    self._watched.call_soon_threadsafe(self._turned, self._asked)
            await asyncio.sleep(_LOOK)

    def _turned(self, asked: float) -> None:
        self._lag = time.monotonic() - asked
        self._asked = None

    @property
    def lag(self) -> float:
        """How late the worker's loop was; while it is blocked, for how long so far."""
        asked = self._asked
        return self._lag if asked is None else max(self._lag, time.monotonic() - asked)

    def why_not_alive(self) -> str:
        """Return why the process is not alive; empty: the loop turns."""
        asked = self._asked
        late = 0.0 if asked is None else time.monotonic() - asked
        return f"the event loop has not turned for {late:.1f} s" if late > BLOCKED else ""

    def _why_not(self, worker: ShownWorker | None) -> str:
        if worker is not None:
            return worker.why_not_ready()
        return "no worker now: see the log" if self._has_nodes else "the database has not been reached yet"

    def why_not_ready(self) -> str:
        """Return why no node takes jobs; empty: some node does."""
        if why := self.why_not_alive():
            return why
        found = {name: self._why_not(worker) for name, (_, worker) in self._nodes().items()}
        if not all(found.values()):
            return ""
        return "; ".join(f"{name}: {why}" if name else why for name, why in found.items()) or "no list of nodes yet"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _MOST_CONNECTIONS:
                answer = _response(503, "too many connections")
            else:
                answer = await self._answer(reader)
            async with asyncio.timeout(_WRITE):
                writer.write(answer)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, asyncio.IncompleteReadError):  # it went away, or does not read: TimeoutError is one of them
            writer.transport.abort()
        finally:
            self._connections -= 1

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(_READ):
                head = await reader.readuntil(b"\r\n\r\n")
            method, path = _parsed(head)
            async with asyncio.timeout(_WORK):
                status, text, kind = await self._page(path)
        except TimeoutError:
            return _response(408, "too slow")
        except asyncio.LimitOverrunError:
            return _response(431, f"at most {_MOST_BYTES} bytes")
        except _Refused as refused:
            return _response(*refused.args)
        except asyncio.IncompleteReadError:
            raise
        except Exception:  # a bug here: report it to this client; the next request may succeed
            log.exception("telemetry: no answer to a request")
            return _response(503, "unexpected error: see the worker's log")
        return _response(status, text, kind, bodiless=method == "HEAD")

    async def _page(self, path: str) -> tuple[int, str, str]:
        plain = "text/plain; charset=utf-8"
        if path == "/metrics":
            return 200, await self._metrics(), CONTENT_TYPE
        if path in ("/healthz", "/readyz"):
            why = self.why_not_alive() if path == "/healthz" else self.why_not_ready()
            return (503, why, plain) if why else (200, "ok", plain)
        raise _Refused(404, "not found; this port serves /metrics, /healthz and /readyz")

    async def _metrics(self) -> str:
        nodes = self._nodes()
        moved = [name for name, kept in self._databases.items() if name not in nodes or nodes[name][0] != kept[0]]
        left = [self._databases.pop(name) for name in moved]
        for name, (dsn, _) in nodes.items():
            if name not in self._databases:
                self._databases[name] = (dsn, Database(dsn, self._settings.name), Shown())
        asked = [self._databases[name] for name in nodes]
        for _, database, _ in left:
            await database.close()
        numbers = await asyncio.gather(*(database.numbers() for _, database, _ in asked))
        found: dict[str, dict[str, list[Sample]]] = {}
        for (name, (_, worker)), (_, _, shown), answer in zip(nodes.items(), asked, numbers, strict=True):
            found[name] = of_the_database(answer, shown) | (of_the_node(worker) if worker else {})
            found[name]["tallybook_worker_ready"] = [((), float(not (self.why_not_alive() or self._why_not(worker))))]
        first = next((worker for _, worker in nodes.values() if worker), None)
        shared: dict[str, list[Sample]] = {
            "tallybook_worker_info": [((self._settings.name, version() or ""), 1.0)],
            "tallybook_worker_loop_lag_seconds": [((), self.lag)],
            **(of_the_process(first) if first else {}),
        }
        return exposition((of_nodes(found) if self._has_nodes else found[""]) | shared)


def _parsed(head: bytes) -> tuple[str, str]:
    """Return method and path of a valid request. Raises _Refused."""
    first, *headers = head[:-4].split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if not request or not all(map(_HEADER.fullmatch, headers)):
        raise _Refused(400, "not a valid HTTP/1.1 request")
    names = [header.partition(b":")[0].lower() for header in headers]
    if request[1] not in (b"GET", b"HEAD"):
        raise _Refused(405, "only GET and HEAD")
    if names.count(b"host") != 1 and (request[3] == b"1" or names.count(b"host") > 1):
        raise _Refused(400, "exactly one Host header is required")
    if b"content-length" in names or b"transfer-encoding" in names:
        raise _Refused(400, "a request must not have a body")
    return request[1].decode(), request[2].partition(b"?")[0].decode()


def _response(status: int, text: str, kind: str = "text/plain; charset=utf-8", *, bodiless: bool = False) -> bytes:
    body = (text if text.endswith("\n") else text + "\n").encode()
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["Allow: GET, HEAD"] if status == 405 else []),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + (b"" if bodiless else body)
