"""Runs and measures a peer; the benchmarks call this module.

Every run has a fresh database on the given server, installed by the peer itself and dropped at the end, so that no run
inherits another's bloat. The drivers beside this file do the work, each in its own process. None outlives the call, and
none outlives this process either (see `--harness` in driver.py).
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg import conninfo, sql

from bench.peers.env import PYTHON, available

HERE = Path(__file__).resolve().parent
_PYTHON = [str(PYTHON), "-W", "ignore"]
_GRAPHILE = ["node", str(HERE / "node" / "graphile_peer.mjs")]
_WORKERS: dict[str, Sequence[str]] = {
    "graphile": _GRAPHILE,
    "pgqueuer": [*_PYTHON, str(HERE / "pgqueuer_peer.py")],
    "procrastinate": [*_PYTHON, str(HERE / "procrastinate_peer.py")],
}
_PRODUCERS: dict[str, Sequence[str]] = {
    **_WORKERS,
    "graphile": [*_PYTHON, str(HERE / "graphile_producer.py")],
}
PEERS = tuple(_WORKERS)
START_LIMIT = 30.0
"""Seconds that a process may take to start, connect and be ready."""
SLOWEST = 100
"""Jobs per second: the time limit of a drain is the time at this rate, plus `START_LIMIT`."""


class PeerError(Exception):
    """A peer could not be run, ended early or took too long."""


def _uri(dsn: str, database: str) -> str:
    """Return `dsn` for another database, in the one form that libpq, asyncpg and node-postgres all read."""
    given = {key: str(value) for key, value in conninfo.conninfo_to_dict(dsn).items() if value is not None}
    with psycopg.connect(dsn) as connection:
        info = connection.info
        given |= {"host": given.get("host") or info.host, "port": str(info.port), "user": info.user}
    given.pop("dbname", None)
    user, password = given.pop("user"), given.pop("password", None)
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    return f"postgresql://{login}@/{database}?{urlencode(given)}"


@contextmanager
def _fresh_database(dsn: str) -> Iterator[str]:
    """Make a database on the server of `dsn`, yield its URI, and drop it at the end."""
    name = f"peer_{secrets.token_hex(6)}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            yield _uri(dsn, name)
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


class _Driver:
    """A driver as a child process with its own process group, killed as a whole on exit."""

    def __init__(self, command: Sequence[str], *arguments: str) -> None:
        self._name = f"{Path(command[-1]).stem} {arguments[0]}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [*command, *arguments, "--harness"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    def _failed(self, why: str) -> PeerError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return PeerError(f"{self._name} {why}" + (f":\n{said[-4000:]}" if said else ""))

    def line(self, before: float) -> dict[str, Any]:
        """Wait for the next line of the driver, until `before` on the monotonic clock."""
        try:
            line = self._lines.get(timeout=max(0.0, before - time.monotonic()))
        except queue.Empty:
            raise self._failed("took too long") from None
        if line is None:
            raise self._failed(f"ended early, with exit status {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ready(self, before: float) -> None:
        """Wait until the driver is ready."""
        if self.line(before) != {"ready": True}:
            raise self._failed("did something before it was ready")

    def go(self) -> None:
        """Let the driver begin."""
        assert self._process.stdin
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended early") from None


def _call(command: Sequence[str], limit: float, *arguments: str) -> dict[str, Any]:
    """Run a driver to its end and return its result."""
    with _Driver(command, *arguments) as driver:
        return driver.line(time.monotonic() + limit)


def _check(peer: str) -> None:
    if peer not in PEERS:
        raise PeerError(f"unknown peer {peer!r}: {', '.join(PEERS)}")
    reason = available()[peer]
    if reason:
        raise PeerError(f"{peer}: {reason}")


def drain(
    peer: str, dsn: str, count: int, processes: int = 1, *, analyze: bool = True, limit: float | None = None
) -> float:
    """Enqueue `count` no-op jobs, run them with `processes` workers, and return the jobs per second.

    Measured from the first start of a job in any process to the last end in any. The start of the processes, the
    loading, and what a peer writes after its last handler has returned do not count.

    `analyze` gives the planner statistics of the loaded tables, as autovacuum would within a minute; without them
    a peer can run at half its rate. `limit` is in seconds; default: 30, plus one for every 100 jobs.
    """
    _check(peer)
    limit = START_LIMIT + count / SLOWEST if limit is None else limit
    worker = _WORKERS[peer]
    with _fresh_database(dsn) as uri, ExitStack() as stack:
        _call(worker, START_LIMIT, "install", "--dsn", uri)
        _call(worker, limit, "enqueue", "--dsn", uri, "--count", str(count))
        if analyze:
            with psycopg.connect(uri, autocommit=True) as connection:
                connection.execute("vacuum (analyze)")
        command = ["drain", "--dsn", uri, "--count", str(count)]
        drivers = [stack.enter_context(_Driver(worker, *command)) for _ in range(processes)]
        before = time.monotonic() + START_LIMIT
        for driver in drivers:
            driver.ready(before)
        for driver in drivers:
            driver.go()
        before = time.monotonic() + limit
        results = [driver.line(before) for driver in drivers]
    busy = [result for result in results if result["done"]]
    done = sum(result["done"] for result in busy)
    if done < count:
        raise PeerError(f"{peer} reported the end after {done} of {count} jobs")
    return float(count / (max(result["last_end"] for result in busy) - min(result["first_start"] for result in busy)))


def latency(peer: str, dsn: str, rate: float, seconds: float) -> tuple[float, float]:
    """Send `rate` jobs per second for `seconds`, one per transaction; return p50 and p99 from commit to start, in ms.

    There is one worker process with the peer's ordinary settings. One producer process sends for a second before it
    counts. The commit is when the producer's call has returned; a job that started before that counts as 0.
    """
    _check(peer)
    arguments = ["--rate", str(rate), "--seconds", str(seconds)]
    with _fresh_database(dsn) as uri:
        _call(_WORKERS[peer], START_LIMIT, "install", "--dsn", uri)
        with (
            _Driver(_WORKERS[peer], "latency", "--dsn", uri, *arguments) as worker,
            _Driver(_PRODUCERS[peer], "produce", "--dsn", uri, *arguments) as producer,
        ):
            before = time.monotonic() + START_LIMIT
            producer.ready(before)
            worker.ready(before)
            producer.go()
            before = time.monotonic() + START_LIMIT + 2 * seconds
            sent: list[float] = producer.line(before)["sent"]
            starts: list[tuple[int, float]] = worker.line(before)["starts"]
    # A job that was started twice counts with its first start.
    first = dict(sorted(starts, key=lambda start: -start[1]))
    waits = sorted(max(0.0, first[n] - t) * 1_000 for n, t in enumerate(sent))
    return _quantile(waits, 0.50), _quantile(waits, 0.99)


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
