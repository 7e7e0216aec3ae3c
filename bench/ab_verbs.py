"""The CPU time of single verbs on two commits, for `bench.ab`: both on one server, in turns of a few milliseconds.

Other load slows both sides alike, so the medians show a difference of two per cent even on a busy machine.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psycopg

from bench.cpu import thread_cpu
from bench.server import server, start_worker
from tallybook.embedded import Server

T = TypeVar("T")
Pairs = dict[str, list[tuple[float, float]]]
_MIGRATE = "import sys, psycopg, tallybook\nwith psycopg.connect(sys.argv[1]) as c: tallybook.migrate(c)"
_SINGLE = 20
_CLAIM = "select from tallybook.claim(%s, '{default}', array[%s]::int[], %s, durable => false)"


class Session:
    """One side: a connection to a database with that commit's schema, and the times that its verbs took."""

    def __init__(self, running: Server, name: str, src: Path) -> None:
        dsn = running.create_database(name)
        environment = {**os.environ, "PYTHONPATH": str(src)}
        subprocess.run([sys.executable, "-P", "-c", _MIGRATE, dsn], env=environment, check=True)
        self.conn: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True, prepare_threshold=1)
        self.conn.execute("set synchronous_commit = off")
        self.worker = start_worker(self.conn, ["default"])
        self.took: dict[str, list[float]] = defaultdict(list)

    def turn(self, jobs: int) -> None:
        """Enqueue, claim, read and complete a batch of this size."""
        lease = uuid4()
        arrays = (["default"] * jobs, ["noop"] * jobs, ["{}"] * jobs)
        self._timed(f"enqueue_many_{jobs}", lambda: self._all("select tallybook.enqueue_many(%s, %s, %s)", *arrays))
        self._timed(f"claim_{jobs}", lambda: self._all(_CLAIM, self.worker, jobs, lease))
        read = "select job_id, attempt, task, args from tallybook.claimed_jobs(%s)"
        rows = self._timed(f"claimed_jobs_{jobs}", lambda: self._all(read, lease))
        ends = ([lease] * len(rows), [row[0] for row in rows], [row[1] for row in rows])
        complete = "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])"
        self._timed(f"complete_many_{jobs}", lambda: self._all(complete, *ends))

    def singles(self) -> None:
        """Enqueue some jobs by one call each, into a queue that nobody claims from."""
        one = "select tallybook.enqueue('other', 'noop', '{}')"
        self._timed("enqueue", lambda: [self._all(one) for _ in range(_SINGLE)], calls=_SINGLE)

    def _all(self, statement: str, *values: object) -> list[Any]:
        return self.conn.execute(statement.encode(), values or None).fetchall()

    def _timed(self, verb: str, run: Callable[[], T], calls: int = 1) -> T:
        before = thread_cpu(self.conn.info.backend_pid)
        found = run()
        self.took[f"cpu_us_{verb}"].append((thread_cpu(self.conn.info.backend_pid) - before) / calls * 1e6)
        return found


def compare(base: Path, this: Path, turns: int) -> Pairs:
    """Return for each verb the CPU microseconds of both sides per turn; the first turns plan and are left out."""
    with server() as running:
        sides = [Session(running, "base", base), Session(running, "this", this)]
        for _ in range(turns + 5):
            for side in random.sample(sides, 2):
                side.turn(100)
                side.turn(1)
                side.singles()
        for side in sides:
            side.conn.close()
        then, now = (side.took for side in sides)
        return {verb: list(zip(then[verb][5:], now[verb][5:], strict=True)) for verb in now}
