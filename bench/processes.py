"""Starts the benchmark's own worker processes, and ends them in any case."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any


class Process:
    """One `bench.worker_process`; a context manager that leaves no process behind.

    quiet: hide its log, if thousands of failures are expected.
    """

    def __init__(self, *arguments: str, quiet: bool = False) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "bench.worker_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )

    def __enter__(self) -> Process:
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != "ready":
            raise RuntimeError("the benchmark's worker did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    def go(self) -> None:
        """Let it start working (drain), or end (serve)."""
        assert self._child.stdin is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return its report at its end."""
        assert self._child.stdout is not None
        found: dict[str, Any] = json.loads(self._child.stdout.readline())
        return found


def drain(dsn: str, jobs: int, processes: int, slots: int) -> float:
    """Return the jobs per second from the first handler's start to the last handler's end, over all processes."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Process("drain", dsn, str(slots))) for _ in range(processes)]
        for worker in workers:
            worker.go()
        said = [worker.answer() for worker in workers]
    worked = [answer for answer in said if answer["done"]]
    assert sum(answer["done"] for answer in said) == jobs, f"{said} of {jobs}"
    assert sum(answer["completed"] for answer in said) == jobs, f"{said} of {jobs}"
    return jobs / (max(a["last"] for a in worked) - min(a["first"] for a in worked))
