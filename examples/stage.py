"""What every example is run by: an embedded PostgreSQL, real processes, a deadline, and an honest last line.

An example says what to start and when it is done. `SERVE=1` keeps it up for a person to look at, `SHORT=1` asks for a short form.
All processes hang on this one: they end with it, however that comes.
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
    """One run of one example, in a database of its own that is gone at the end; or in several, on a server each."""

    def __init__(self, name: str, nodes: int = 1, *, connections: int = 100, seconds: float = _LIMIT) -> None:
        self.name = name
        self.nodes = nodes
        self.connections = connections
        self.seconds = seconds
        self.began = time.monotonic()
        self._stack = ExitStack()
        self._processes: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as by Ctrl-C: what was started is stopped
        self.say("starting an embedded PostgreSQL, which is gone again at the end")
        self.servers = self._servers()
        self.dsns = [server.dsn(self.name) for server in self.servers]
        self.dsn = self.dsns[0]
        # Never prepared: a plan made while the tables are empty would stay when they are full.
        self.db = self._stack.enter_context(psycopg.connect(self.dsn, autocommit=True, prepare_threshold=None))
        if self.nodes == 1:
            migrate(self.db)
        self._stack.callback(self._stop_all)
        return self

    def _servers(self) -> list[Server]:
        """A server for each node, with an empty database; those of a Citus cluster if one was given."""
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
        """Tell the person how far it is."""
        print(f"[{time.monotonic() - self.began:5.1f} s] {text}", flush=True)

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What a query finds."""
        return self.db.execute(query.encode(), values).fetchall()

    def one(self, query: str, *values: object) -> Any:
        """The one value that a query finds."""
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
        """Start an ASGI application under uvicorn and wait until it listens; its address."""
        self.process(name, "uvicorn", asgi, "--port", str(port), "--log-level", "warning", env=env)
        self.until(lambda: listens(port), f"{name} listens")
        return f"http://127.0.0.1:{port}"

    def kill(self, name: str) -> None:
        """SIGKILL: no chance to finish anything."""
        process, errors = self._processes.pop(name)
        process.kill()
        process.wait()
        errors.close()

    def stop(self, *names: str) -> None:
        """SIGTERM, and wait for the end."""
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
        """Wait until it holds. A process that ended, or no time left, ends the run with status 1 and says why."""
        limit = self.began + self.seconds
        while not condition():
            for name, (process, errors) in self._processes.items():
                if process.poll() is not None:
                    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 3000))
                    raise SystemExit(f"{self.name}: {name} ended by itself\n{errors.read().decode(errors='replace')}")
            if time.monotonic() > limit:
                raise SystemExit(f"{self.name}: not in time: {what}")
            time.sleep(0.05)

    def is_idle(self) -> bool:
        """Whether no job is open."""
        return self.ends()[3] == 0

    def ends(self, dsns: Sequence[str] = ()) -> list[int]:
        """How many jobs are completed and dead, how many attempts have failed, and what is open; of these nodes, or of all."""
        found = []
        for dsn in dsns or self.dsns:
            with psycopg.connect(dsn) as conn:
                found += conn.execute(_ENDS).fetchall()
        return [sum(each) for each in zip(*found, strict=True)]

    def end(self, missing: int = 0, *, done: int | None = None, planned: int = 0) -> int:
        """The last line, and the exit status: 0 only if nothing was lost.

        `missing` is what the example's own tables lack, by its own account; `done` counts effects of its own in place of
        completed jobs. What is still open counts as lost, too: an example waits for its end first. But for subjects that live on:
        `planned` says how many have to be open, and one more or less is lost.
        """
        if SERVE:
            self.say("it stays up; Ctrl-C ends it")
            try:
                while True:
                    time.sleep(3600)
            except KeyboardInterrupt:
                print()
        completed, dead, failed, still_open = self.ends()
        self._stop_all()
        lost = missing + (0 if SERVE else abs(still_open - planned))
        print(
            f"{self.name}: {completed if done is None else done} processed, {dead} failed, {failed} retried, {lost} lost",
            flush=True,
        )
        return 0 if lost == 0 else 1

    def _stop_all(self) -> None:
        self.stop(*self._processes)


def listens(port: int) -> bool:
    """Whether somebody answers at this port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """A port that nobody uses now, and that no system gives away by itself: it is free still when its server comes."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SystemExit("of a hundred ports none is free")
