"""One worker process of a benchmark: prints ready, waits for go, works, prints a report.

drain: ends when no job has come for a while. serve: ends at a line on its standard input, or when that closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import bench.zoo  # noqa: F401  it adds its tasks to the app
from bench import app as bench_app
from tallybook._worker.claim.claimer import Claimer
from tallybook._worker.entry import prepared
from tallybook._worker.life.fleet import Fleet
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import SLOTS


async def _drain(dsn: str, slots: int, nodes: int = 0) -> dict[str, object]:
    """Drain the queue; `nodes`: the number of nodes that TALLYBOOK_NODES names."""
    worker = prepared(bench_app.app, dsn=dsn, queues={"default": slots}, nodes="all" if nodes else None)
    go, claim, ready = asyncio.Event(), Claimer.run, 0

    async def gated(self: Claimer) -> None:
        """Connected, registered, lifespans open: only the claims wait for the start."""
        nonlocal ready
        ready += 1
        if ready == max(1, nodes):
            print("ready", flush=True)
        await go.wait()
        await claim(self)

    Claimer.run = gated  # type: ignore[method-assign]
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(sys.stdin.readline)
    cpu = time.process_time()
    go.set()
    before, still, used = -1, 0, 0.0
    while still < 50 and not running.done():  # nothing new for 1 s: one fsync of a disk can take 0.3 s
        await asyncio.sleep(0.02)
        done = bench_app.seen["done"]
        still = still + 1 if done == before and (done or still < 10) else 0
        before = done
        if still < 5:  # the last ends are stored by then; waiting for more work is no job's cost
            used = time.process_time() - cpu
    worker.stop()
    report = await running
    return {**bench_app.seen, "completed": report.completed, "cpu_s": used}


def _at_work(worker: Worker) -> bool:
    """Return whether it has claimed, or waits for the next job; behind a pooler it polls, and has no sleeper."""
    polls = worker.sleeper is None and bool(worker._background.tasks)
    return polls or bool(worker.claimer.claimed) or (worker.sleeper is not None and worker.sleeper.clear)


def _all_at_work(worker: Worker | Fleet, nodes: int) -> bool:
    if isinstance(worker, Worker):
        return _at_work(worker)
    workers = [life.worker for life in worker.lives.values() if life.worker is not None]
    return len(workers) == nodes and all(map(_at_work, workers))


async def _serve(dsn: str, options: dict[str, Any]) -> dict[str, object]:
    """Run a worker with these settings (durations as text) until told to end. `nodes`: serve all nodes, this many."""
    options["queues"], nodes = {"default": options.pop("slots", SLOTS)}, options.pop("nodes", 0)
    worker = prepared(bench_app.app, dsn=dsn, nodes="all" if nodes else None, **options)
    running = asyncio.create_task(worker.run())
    while not _all_at_work(worker, nodes):
        await asyncio.wait((running,), timeout=0.02)
        if running.done():
            await running  # raises its error
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    worker.stop()
    report = await running
    return {
        "starts": bench_app.starts,
        "ends": bench_app.ends,
        "fires": bench_app.fires,
        "spells": bench_app.spells,
        "completed": report.completed,
    }


async def main(what: str, dsn: str, given: str) -> None:
    """Work, and print the report."""
    said = await (_drain(dsn, *map(int, given.split())) if what == "drain" else _serve(dsn, json.loads(given)))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *(sys.argv[3:] or ["{}"])))
