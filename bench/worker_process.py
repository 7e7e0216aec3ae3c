"""One worker process of a benchmark: says ready, waits for go, works, says what it did.

drain: ends by itself when nothing has come for a while. latency: ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys

from bench import app as bench_app
from tallybook._worker.settings import WorkerSettings
from tallybook._worker.worker import Worker


async def _drain(dsn: str, slots: int) -> dict[str, object]:
    worker = Worker(bench_app.app, dsn, WorkerSettings(queues={"default": slots}))
    go, claim = asyncio.Event(), worker.claimer.run

    async def gated() -> None:
        """Connected, on record, lifespans open: only the claims wait for the start."""
        print("ready", flush=True)
        await go.wait()
        await claim()

    worker.claimer.run = gated  # type: ignore[method-assign]
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(sys.stdin.readline)
    go.set()
    before, still = -1, 0
    while still < 15 and not running.done():  # nothing new for 0.3 s
        await asyncio.sleep(0.02)
        done = bench_app.seen["done"]
        still = still + 1 if done == before and (done or still < 10) else 0
        before = done
    worker.stop()
    report = await running
    return {**bench_app.seen, "completed": report.completed}


async def _latency(dsn: str) -> dict[str, object]:
    worker = Worker(bench_app.app, dsn, WorkerSettings())
    running = asyncio.create_task(worker.run())
    while worker.sleeper is None or not worker.sleeper.clear:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    worker.stop()
    await running
    return {"starts": bench_app.starts}


if __name__ == "__main__":
    what, dsn = sys.argv[1:3]
    print(json.dumps(asyncio.run(_drain(dsn, int(sys.argv[3])) if what == "drain" else _latency(dsn))), flush=True)
