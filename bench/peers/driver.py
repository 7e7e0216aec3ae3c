"""The shared part of the peers' Python drivers: the command line, the counting and the pacing.

It runs in the peers' own environment, never in Tallybook's, and only the drivers beside it import it.
A driver is one process with one command. Its last line on stdout is its result, as JSON:

    install --dsn DSN                         {"installed": true}
    enqueue --dsn DSN --count N               {"count": N, "seconds": s}
    drain   --dsn DSN --count N               {"done": n, "first_start": t, "last_end": t}
    latency --dsn DSN --rate R --seconds S    {"starts": [[n, t], ...]}      the worker
    produce --dsn DSN --rate R --seconds S    {"sent": [t, ...]}             the producer beside it; t of job n at [n]

Every t is CLOCK_REALTIME in seconds. With `--harness` a driver also prints `{"ready": true}` when it has connected (the
worker of `latency`: when it has started its first job). It ends when its stdin does, so that a killed harness leaves no
driver behind. `drain` and `produce` then wait for a line on stdin before they begin, so that processes start together.

graphile_peer.mjs has the same interface, in JavaScript.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NotRequired, Protocol, TypedDict

import psycopg

BATCH = 1_000
LOOK_EVERY = 0.05
WARM_UP = 1.0


class Args(TypedDict):
    """The args of a job. Numbers below zero are the warm-up of `latency` and count in no figure."""

    to: str
    n: NotRequired[int]


Number = Callable[[], int]
Seen = Callable[[Number], None]
Enqueue = Callable[[list[Args]], Awaitable[object]]


class Worker(Protocol):
    """One worker process of a peer, connected but not started."""

    async def run(self) -> None:
        """Run jobs until `stop`."""

    def stop(self) -> None:
        """Let `run` return."""


class Peer(Protocol):
    """A queue, as a driver uses it."""

    left: str
    """SQL that returns whether any job is not done yet."""

    async def install(self, dsn: str) -> None:
        """Create the schema in a fresh database."""

    def enqueuer(self, dsn: str) -> AbstractAsyncContextManager[Enqueue]:
        """Yield a call that enqueues its jobs in one transaction: one by the API for one, more by the API for many."""

    def worker(self, dsn: str, seen: Seen, *, throughput: bool) -> AbstractAsyncContextManager[Worker]:
        """Yield a worker whose handler only calls `seen`, configured for throughput or with its defaults."""


def args(n: int) -> Args:
    """Return the args of job `n`."""
    return {"to": f"user{n}@example.com", "n": n}


def say(**line: object) -> None:
    """Print one line of JSON."""
    print(json.dumps(line), flush=True)


@dataclass
class Harness:
    """The process that started this one, if any: the lines that it sends to our stdin, and its end."""

    present: bool
    _go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Listen to stdin, from a thread: a plain read works for pipes and files alike."""
        if self.present:
            threading.Thread(target=self._listen, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        while os.read(0, 4096):
            loop.call_soon_threadsafe(self._go.set)
        os._exit(3)

    def ready(self) -> None:
        """Report that this process is ready."""
        if self.present:
            say(ready=True)

    async def go(self) -> None:
        """Wait for the signal to begin."""
        if self.present:
            await self._go.wait()


@dataclass
class Drained:
    """Counts the jobs of a drain; it runs once per job, so it does as little as possible."""

    done: int = 0
    first_start: float = 0.0
    last_end: float = 0.0

    def __call__(self, number: Number) -> None:
        now = time.time()
        if not self.done:
            self.first_start = now
        self.done += 1
        self.last_end = now


@dataclass
class Started:
    """Records when each job was started."""

    expected: int
    on_first: Callable[[], None]
    starts: list[tuple[int, float]] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    _warm: bool = False

    def __call__(self, number: Number) -> None:
        now = time.time()
        if not self._warm:
            self._warm = True
            self.on_first()
        n = number()
        if n >= 0:
            self.starts.append((n, now))
            if len(self.starts) >= self.expected:
                self.finished.set()


async def enqueue(peer: Peer, dsn: str, count: int) -> None:
    """Enqueue `count` jobs, 1,000 per transaction."""
    async with peer.enqueuer(dsn) as put:
        began = time.time()
        for first in range(0, count, BATCH):
            await put([args(n) for n in range(first, min(first + BATCH, count))])
    say(count=count, seconds=time.time() - began)


async def drain(peer: Peer, dsn: str, count: int, harness: Harness) -> None:
    """Run jobs until all `count` are done, here or in another process.

    The database is asked only if no job ended here between two checks: while jobs run, checks cost nothing.
    """
    drained = Drained()
    async with (
        peer.worker(dsn, drained, throughput=True) as worker,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        harness.ready()
        await harness.go()
        running = asyncio.create_task(worker.run())
        before = -1
        while not running.done():
            await asyncio.sleep(LOOK_EVERY)
            if drained.done == before:
                row = await (await connection.execute(peer.left.encode())).fetchone()
                if row == (False,):
                    break
            before = drained.done
        worker.stop()
        await running
    say(done=drained.done, first_start=drained.first_start, last_end=drained.last_end)


async def latency(peer: Peer, dsn: str, count: int, harness: Harness) -> None:
    """Run jobs until `count` of the numbered ones have started."""
    started = Started(count, harness.ready)
    async with peer.worker(dsn, started, throughput=False) as worker:
        running = asyncio.create_task(worker.run())
        finished = asyncio.create_task(started.finished.wait())
        await asyncio.wait((running, finished), return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        await running
        finished.cancel()
    say(starts=started.starts)


def beats(rate: float, count: int) -> Iterator[tuple[int, float]]:
    """Yield the job numbers, warm-up first, and when each is due on the clock of `time.perf_counter`."""
    warm_up = round(rate * WARM_UP)
    began = time.perf_counter()
    for beat in range(warm_up + count):
        n = beat - warm_up
        yield n, began + beat / rate


async def produce(peer: Peer, dsn: str, rate: float, count: int, harness: Harness) -> None:
    """Enqueue jobs one by one, evenly paced, each in its own transaction, and record when each commit returned."""
    sent: list[float] = []
    async with peer.enqueuer(dsn) as put:
        await put([args(-1)])  # The worker's first job: the worker is ready when it has started it.
        harness.ready()
        await harness.go()
        for n, due in beats(rate, count):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await put([args(n)])
            if n >= 0:
                sent.append(time.time())
    say(sent=sent)


async def _run(peer: Peer, given: argparse.Namespace) -> None:
    harness = Harness(given.harness)
    match given.command:
        case "install":
            await peer.install(given.dsn)
            say(installed=True)
        case "enqueue":
            await enqueue(peer, given.dsn, given.count)
        case "drain":
            await drain(peer, given.dsn, given.count, harness)
        case "latency":
            await latency(peer, given.dsn, round(given.rate * given.seconds), harness)
        case "produce":
            await produce(peer, given.dsn, given.rate, round(given.rate * given.seconds), harness)


def main(peer: Peer, runner: Callable[..., object] = asyncio.run) -> None:
    """Run the command of the command line, on the event loop of `runner`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["install", "enqueue", "drain", "latency", "produce"])
    parser.add_argument("--dsn", required=True, help="a URI: postgresql://user@/database?host=/directory")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--harness", action="store_true")
    runner(_run(peer, parser.parse_args()))
