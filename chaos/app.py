"""The application under attack. Its workers are `tallybook worker -A chaos.app:app`.

Every start of a handler writes a line to a file of its process: key, job, attempt, time. A file survives all faults of
process and server, and is not part of the tested system.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from tallybook import App, Constant, Context

app = App("chaos")

# A handler fails when its database is down. There are many outages, which must not use up a job's attempts.
_SOON = Constant(timedelta(seconds=0.5))
_MANY = 1000
TWO_PHASE = "insert into orders (tenant, number) select 0, 0 where false"
"""Inserts nothing; Citus then commits what the transaction changes on other nodes in two phases."""
_EFFECT = "insert into effect (job_id, attempt, key, worker) values (%s, %s, %s, %s)"


@app.lifespan
async def files(ctx: Any) -> AsyncIterator[None]:
    """Open the process's file of runs."""
    name = Path(os.environ["CHAOS_RUNS"]) / f"{os.getpid()}-{time.time_ns()}"
    ctx.state.runs = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        yield
    finally:
        os.close(ctx.state.runs)


def _note(ctx: Context, key: int) -> None:
    os.write(ctx.state.runs, b"%d %d %d %.3f\n" % (key, ctx.job_id, ctx.attempt, time.time()))


def _pause() -> float:
    """Return a pause in seconds: mostly short, a tenth long enough for a fault to happen meanwhile."""
    return random.uniform(1.5, 2.5) if random.random() < 0.1 else random.uniform(0.0, 0.1)


@app.task(retry=_SOON, max_attempts=_MANY)
async def plain(ctx: Context, key: int) -> None:
    """Note a run, at least once."""
    _note(ctx, key)


@app.task(retry=_SOON, max_attempts=_MANY)
async def flaky(ctx: Context, key: int) -> None:
    """Fail in the first attempt."""
    _note(ctx, key)
    if ctx.failures == 0:
        raise RuntimeError("the first attempt of this one always fails")


@app.task(atomic=True, queue="effects", retry=_SOON, max_attempts=_MANY)
async def effect(tx: psycopg.AsyncConnection[Any], ctx: Context, key: int) -> None:
    """Write exactly one effect, which commits together with the end of the attempt."""
    _note(ctx, key)
    await asyncio.sleep(_pause())
    await tx.execute(_EFFECT, (ctx.job_id, ctx.attempt, key, ctx.worker))
    await asyncio.sleep(_pause() / 10)


@app.task(atomic=True, queue="effects", retry=_SOON, max_attempts=_MANY)
def effect_in_thread(tx: psycopg.Connection[Any], ctx: Context, key: int) -> None:
    """Write the same effect in a thread, which cannot be cancelled: a zombie finishes it."""
    _note(ctx, key)
    time.sleep(_pause())
    tx.execute(_EFFECT, (ctx.job_id, ctx.attempt, key, ctx.worker))
    linger = Path(os.environ["CHAOS_LINGER"])
    if linger.exists():
        # Only the fence may keep a zombie out: whether the worker's own cancel comes in time is a race.
        tx.cancel = lambda: None  # type: ignore[method-assign]
    while linger.exists():  # a nemesis needs this process with an uncommitted effect
        linger.with_name(f"{linger.name}-{os.getpid()}").touch()
        time.sleep(0.02)


@app.task(atomic=True, retry=_SOON, max_attempts=_MANY)
async def confirm(tx: psycopg.AsyncConnection[Any], tenant: int, number: int) -> None:
    """Count a tenant's order as confirmed, on whichever node Citus has its row now: see tenants.py."""
    await asyncio.sleep(_pause())
    await tx.execute(TWO_PHASE)
    await tx.execute("update orders set confirmed = confirmed + 1 where tenant = %s and number = %s", (tenant, number))


_KINDS = [effect] * 3 + [effect_in_thread] * 2 + [flaky] * 2 + [plain] * 43


def task_of(key: int) -> Any:
    """Return the task of a key's job: a tenth has effects, one in 25 fails once, one in 50 starts a second later."""
    task = _KINDS[key % len(_KINDS)]
    return task.with_(delay=timedelta(seconds=1)) if key % len(_KINDS) == 10 else task
