"""The runner of every example: an embedded PostgreSQL, real processes, a deadline, and an honest last line.

An example defines what to start and when it is done. `SERVE=1` keeps it running so that you can look at it; `SHORT=1`
asks for a short run. All child processes end with this one.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

import psycopg

from tallybook import migrate
from tallybook.embedded import Server, temporary_server
from tools import citus

SHORT = os.environ.get("SHORT", "") not in ("", "0")
SERVE = os.environ.get("SERVE", "") not in ("", "0")
_LIMIT = 280.0

_ENDS = """\
select coalesce(sum(c.completed), 0)::bigint, coalesce(sum(c.dead), 0)::bigint, coalesce(sum(c.failed), 0)::bigint,
       coalesce(sum(c.scheduled + c.retrying + c.waiting + c.available + c.running), 0)::bigint
  from tallybook.counts() c"""


class Stage:
    """One run of one example in a temporary database, or in `nodes` databases on one server each."""

    def __init__(self, name: str, nodes: int = 1, *, connections: int = 100, seconds: float = _LIMIT) -> None:
        self.name = name
        self.nodes = nodes
        self.connections = connections
        self.seconds = seconds
        self.began = time.monotonic()
        self._stack = ExitStack()
        self._processes: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C does: child processes are stopped
        self.say("starting an embedded PostgreSQL, which is removed at the end")
        self.servers = self._servers()
        self.dsns = [server.dsn(self.name) for server in self.servers]
        self.dsn = self.dsns[0]
        # No prepared statements: a plan made for empty tables would be kept when they are full.
        self.db = self._stack.enter_context(psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None))
        if self.nodes == 1:
            migrate(self.db)
        self._stack.callback(self._stop_all)
        return self

    def _servers(self) -> list[Server]:
        """Start a server with an empty database for each node; a Citus cluster if one was given."""
        if self.nodes > 1 and citus.given():
            return self._stack.enter_context(citus.cluster(self.nodes, self.name))
        settings = {"max_connections": self.connections}
        servers = [self._stack.enter_context(temporary_server(settings=settings)) for _ in range(self.nodes)]
        for server in servers:
            server.create_database(self.name)
        return servers

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """Print a line of progress with the seconds since the start."""
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self.db.execute(query.encode(), values).fetchall()

    def one(self, query: str, *values: object) -> Any:
        """Return the first value of a query, or None."""
        found = self.rows(query, *values)
        return found[0][0] if found else None

    def schema(self, file: Path) -> None:
        """Run an example's own SQL."""
        self.db.execute(file.read_bytes())

    def process(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python -m words...` under a name, with the database in TALLYBOOK_DSN."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        started = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "TALLYBOOK_DSN": self.dsn, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
        )
        self._processes[name] = (started, errors)

    def worker(self, name: str, app: str, *options: str, env: Mapping[str, str] | None = None) -> None:
        """Start `tallybook worker -A app`."""
        self.process(name, "tallybook", "worker", "-A", app, "--name", name, "--stop-timeout", "3 s", *options, env=env)

    def web(self, name: str, asgi: str, port: int, env: Mapping[str, str] | None = None) -> str:
        """Start an ASGI application under uvicorn, wait until it listens and return its address."""
        self.process(name, "uvicorn", asgi, "--port", str(port), "--log-level", "warning", env=env)
        self.until(lambda: listens(port), f"{name} listens")
        return f"http://127.0.0.1:{port}"

    def kill(self, name: str) -> None:
        """Send SIGKILL to a process, so that it cannot finish anything."""
        process, errors = self._processes.pop(name)
        process.kill()
        process.wait()
        errors.close()

    def stop(self, *names: str) -> None:
        """Send SIGTERM to processes and wait until they end, at most 10 s each."""
        for name in names:
            self._processes[name][0].send_signal(signal.SIGTERM)
        for name in names:
            process, errors = self._processes.pop(name)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            errors.close()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Exit with status 1 and the reason if a process ends or the time is up."""
        limit = self.began + self.seconds
        while not condition():
            for name, (process, errors) in self._processes.items():
                if process.poll() is not None:
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 3000))
                    raise SystemExit(f"{self.name}: {name} ended early\n{errors.read().decode(errors='replace')}")
            if time.monotonic() > limit:
                raise SystemExit(f"{self.name}: time is up while waiting for: {what}")
            time.sleep(0.05)

    def is_idle(self) -> bool:
        """Return whether no job is open."""
        return self.ends()[3] == 0

    def ends(self, dsns: Sequence[str] = ()) -> list[int]:
        """Return the numbers of completed jobs, dead jobs, failed attempts and open jobs of these nodes, or of all."""
        found = []
        for dsn in dsns or self.dsns:
            with psycopg.connect(dsn) as conn:
                found += conn.execute(_ENDS).fetchall()
        return [sum(each) for each in zip(*found, strict=True)]

    def end(self, missing: int = 0, *, done: int | None = None, planned: int = 0) -> int:
        """Print the last line and return the exit status, which is 0 only if nothing was lost.

        `missing` is the number of effects that the example's own check did not find. `done` replaces the number of
        completed jobs. Open jobs count as lost, because an example waits for its jobs first. Subjects stay open:
        `planned` is how many jobs must be open, and each one more or less counts as lost.
        """
        if SERVE:
            self.say("still running; press Ctrl-C to stop")
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                print()
        completed, dead, failed, still_open = self.ends()
        self._stop_all()
        lost = missing + (0 if SERVE else abs(still_open - planned))
        print(
            f"{self.name}: {completed if done is None else done} processed, {dead} failed, {failed} retried,"
            f" {lost} lost",
            flush=True,
        )
        return 0 if lost == 0 else 1

    def _stop_all(self) -> None:
        self.stop(*self._processes)


def listens(port: int) -> bool:
    """Return whether a server listens on this local port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a free port outside the range that systems assign, so that it is still free when its server starts."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("none of a hundred ports is free")
