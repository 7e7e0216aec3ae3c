"""Jobs of 50 ms of CPU in two processes: `process=True` beside Celery's prefork on Redis, interleaved.

All jobs are enqueued before the worker starts. The throughput counts from the first start of a job to the last end. Two
more figures are the time from the start of the worker's program to its first job, and the memory of the worker and its
children, with each shared page counted once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench import peers
from bench.figures import SCALE, Figure, at_least, median, plain, say
from bench.peers.env import PYTHON
from bench.server import database, load, server
from tallybook.embedded import Server

ROOT = Path(__file__).resolve().parents[1]
_PROCESSES, _PATIENCE = 2, 300.0
# Jobs that a worker holds: Celery's prefork worker takes four per process, too.
_HELD = 4 * _PROCESSES


@dataclass
class Run:
    """One drain: jobs per second, seconds to the first job, MB."""

    rate: float
    first: float
    memory: float


def _ours(running: Server, jobs: int) -> Run:
    with database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            load(conn, jobs, queue="burn", task="burn")
        words = [
            "-A",
            "bench.burn_app:app",
            "--queues",
            f"burn={_HELD}",
            "--children",
            str(_PROCESSES),
            "--log-level",
            "error",
        ]
        command = [sys.executable, "-m", "tallybook", "worker", *words]
        return _drain(command, jobs, {"TALLYBOOK_DSN": dsn})


def _celery(jobs: int) -> Run:
    with _redis() as broker:
        environment = {"BURN_BROKER": broker}
        enqueue = [str(PYTHON), "-m", "bench.peers.celery_peer", str(jobs)]
        subprocess.run(enqueue, check=True, cwd=ROOT, env={**os.environ, **environment, "BURN_LOG": "/"})
        words = ["worker", "--pool", "prefork", "--concurrency", str(_PROCESSES), "--loglevel", "error"]
        return _drain([str(PYTHON), "-m", "celery", "-A", "bench.peers.celery_peer", *words], jobs, environment)


def _drain(command: list[str], jobs: int, environment: dict[str, str]) -> Run:
    with tempfile.TemporaryDirectory() as log:
        begin = time.monotonic()
        worker = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **environment, "BURN_LOG": log}, stdout=subprocess.DEVNULL
        )
        try:
            while len(done := _lines(Path(log))) < jobs:
                if worker.poll() is not None or time.monotonic() - begin > _PATIENCE:
                    raise RuntimeError(f"{len(done)} of {jobs} jobs were done by {' '.join(command)}")
                time.sleep(0.2)
            memory = _memory(worker.pid)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
    first, last = min(start for start, _ in done), max(end for _, end in done)
    return Run(jobs / (last - first), first - begin, memory)


def _lines(log: Path) -> list[tuple[float, float]]:
    """Return start and end of each job, from the complete lines."""
    text = "".join(file.read_text(encoding="ascii") for file in log.iterdir())
    return [(float(start), float(end)) for start, end in re.findall(r"^\d+ (\S+) (\S+)\n", text, re.MULTILINE)]


def _memory(pid: int) -> float:
    """Return the MB of a process and all its descendants, by PSS."""
    total, pids = 0.0, [pid]
    while pids:
        at = Path(f"/proc/{pids.pop()}")
        with suppress(OSError):
            total += int(re.findall(r"^Pss: +(\d+)", (at / "smaps_rollup").read_text(), re.MULTILINE)[0]) / 1024
            for children in at.glob("task/*/children"):
                pids += map(int, children.read_text().split())
    return total


@contextmanager
def _redis() -> Iterator[str]:
    """Run a separate Redis; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 10
            while time.monotonic() < until:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            running.terminate()
            running.wait(10)


def run() -> None:
    """Print the figures."""
    jobs, turns = max(40, int(600 * SCALE)), 3 if SCALE >= 0.5 else 1
    missing = peers.available()["celery"] or (
        None if shutil.which("redis-server") else "redis-server not found (on Debian: the package redis-server)"
    )
    ours, theirs = list[Run](), list[Run]()
    with server() as running:
        for _ in range(turns):
            ours.append(_ours(running, jobs))
            say(f"  cpu_bound: tallybook {ours[-1]}")
            if missing is None:
                theirs.append(_celery(jobs))
                say(f"  cpu_bound: celery {theirs[-1]}")
    if missing is None:
        ratio = median([one.rate for one in ours]) / median([one.rate for one in theirs])
        limit = f"celery {median([one.rate for one in theirs]):.1f}/s, {_PROCESSES / 0.05:g}/s is the whole machine"
        at_least("cpu_bound", "ratio_to_celery", ratio, "ratio", 1.0, limit).show()
    else:
        Figure("cpu_bound", "ratio_to_celery", None, "ratio", "at least 1", None, f"not run: {missing}").show()
    for name, unit in (("rate", "jobs/s"), ("first", "s"), ("memory", "MB")):
        of = {
            who: median([getattr(one, name) for one in runs])
            for who, runs in (("us", ours), ("celery", theirs))
            if runs
        }
        limit = f"celery {of['celery']:.2f}" if theirs else ""
        plain("cpu_bound", {"first": "first_job", "rate": "jobs_per_s"}.get(name, name), of["us"], unit, limit).show()
