"""The application that the benchmarks' workers run."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

from tallybook import App, Constant, Context

app = App("bench")
seen: dict[str, Any] = {"done": 0, "first": 0.0, "last": 0.0}
starts: dict[int, float] = {}
ends: list[float] = []
spells: list[tuple[float, float]] = []
fires: list[tuple[str | None, float, float]] = []


@app.task
async def noop(to: str, n: int) -> None:
    """Do nothing, and record when."""
    now = time.time()
    if not seen["done"]:
        seen["first"] = now
    seen["last"] = now
    seen["done"] += 1


@app.task
async def note(n: int) -> None:
    """Record when the handler of job n started."""
    starts[n] = time.time()


@app.task
async def mark(to: str, n: int) -> None:
    """Record when the handler of job n started; the args are like noop's."""
    starts[n] = time.time()


@app.task
async def fired(ctx: Context) -> None:
    """Record the schedule, the tick, and when the handler started."""
    now = time.time()
    assert ctx.tick is not None
    fires.append((ctx.schedule, ctx.tick.timestamp(), now))


@app.task
async def rest(to: str, n: int) -> None:
    """Sleep ten milliseconds, and record when they ended."""
    await asyncio.sleep(0.01)
    ends.append(time.time())


@app.task
async def spell(n: int) -> None:
    """Sleep ten milliseconds, and record start and end."""
    begun = time.time()
    await asyncio.sleep(0.01)
    spells.append((begun, time.time()))


@app.task
async def hold(ctx: Context) -> None:
    """Wait forever in a worker whose name marks it to be killed; return at once in any other."""
    if ctx.worker.startswith("victim"):
        await asyncio.Event().wait()


@app.task(retry=Constant(timedelta(seconds=1)))
async def again(ctx: Context, n: int) -> None:
    """Record when job n started, n from 1 up: the first attempt, which fails, as n, and the second as -n."""
    starts[n if ctx.attempt == 1 else -n] = time.time()
    if ctx.attempt == 1:
        raise ValueError("once more")
