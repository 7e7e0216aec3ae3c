"""The CPU time of single verbs on two commits, for `bench.ab`: both on one server, in turns of a few milliseconds.

Other load slows both sides alike. A session's plans and memory can favour one side for as long as it lives, so each
pair has new sessions; its value is the median of its turns.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psycopg

from bench.cpu import HERE, thread_cpu
from bench.figures import median
from bench.server import server, start_worker
from tallybook.embedded import Server

T = TypeVar("T")
Pairs = dict[str, list[tuple[float, float]]]
_MIGRATE = """\
import sys, psycopg
from tallybook._db.migrate import migrate
with psycopg.connect(sys.argv[1]) as conn: migrate(conn)"""
_SINGLE = 20
_TURNS, _FIRST = 20, 5
_CLAIM = "select from tallybook.claim(%s, '{default}', array[%s]::int[], %s, durable => false)"


class NotComparable(Exception):
    """The machine has no CPU times of single threads, or a side lacks one of the verbs."""


class Side:
    """A database with one commit's schema, a session there, and the times that its verbs took."""

    def __init__(self, running: Server, name: str, src: Path) -> None:
        self.dsn = running.create_database(name)
        environment = {**os.environ, "PYTHONPATH": str(src)}
        subprocess.run([sys.executable, "-P", "-c", _MIGRATE, self.dsn], env=environment, check=True)
        self.conn: psycopg.Connection[Any]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open a new session."""
        self.took: dict[str, list[float]] = defaultdict(list)
        with psycopg.connect(self.dsn, autocommit=True, prepare_threshold=1) as self.conn:
            self.conn.execute("set synchronous_commit = off")
            self.worker = start_worker(self.conn, ["default"])
            yield

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


def compare(base: Path, this: Path, pairs: int) -> Pairs:
    """Return for each verb the CPU microseconds of both sides, one value per pair. Raises NotComparable."""
    if not HERE:
        raise NotComparable("there is no /proc/self/schedstat")
    found: Pairs = defaultdict(list)
    with server() as running:
        try:
            sides = [Side(running, "base", base), Side(running, "this", this)]
            for _ in range(pairs):
                _pair(sides, found)
        except (psycopg.Error, subprocess.CalledProcessError) as error:
            raise NotComparable(str(error).strip()) from error
    return found


def _pair(sides: list[Side], found: Pairs) -> None:
    """Add one value of each verb; the first turns make the plans and are left out."""
    then, now = sides
    with then.session(), now.session():
        for _ in range(_FIRST + _TURNS):
            for side in random.sample(sides, 2):
                side.turn(100)
                side.turn(1)
                side.singles()
    for verb, took in now.took.items():
        found[verb].append((median(then.took[verb][_FIRST:]), median(took[_FIRST:])))
