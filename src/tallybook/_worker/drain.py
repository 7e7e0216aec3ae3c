"""Drain: run all that is due, then return. For routes that a cron calls, for tests, for scripts."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from tallybook._worker.settings import WorkerSettings
from tallybook._worker.worker import Worker

if TYPE_CHECKING:
    from tallybook._app import App


@dataclass(frozen=True)
class DrainReport:
    """What one drain did."""

    processed: int
    """Attempts that were run to an end."""
    completed: int
    retrying: int
    """Attempts that failed or were snoozed, and go on later."""
    cancelled: int
    dead: int
    moved: int
    """Jobs of unknown tasks, put aside for a worker that knows them."""


async def drain(
    app: App, dsn: str, settings: WorkerSettings, max_jobs: int | None, max_seconds: float | None
) -> DrainReport:
    """Promote, rescue, claim and run until nothing is due, or a limit is reached."""
    worker = Worker(app, dsn, settings)
    until = time.monotonic() + max_seconds if max_seconds is not None else None
    left = max_jobs
    try:
        await worker.start()
        while (left is None or left > 0) and (until is None or time.monotonic() < until):
            if worker._failed:
                raise worker._failed
            await worker.claimer.suspects.start_found(until=until)
            await worker.promoter.look()
            await worker.rescuer.look()
            jobs = await worker.claimer.claim(expect_work=True, most=worker.claimer.suspects.most(left))
            if jobs:
                await worker.claimer.suspects.start(jobs, until=until)
                left = None if left is None else left - len(jobs)
            if not jobs and not worker.book.running and not worker.finisher.waiting:
                if worker.claimer.gate.waiting and not await _gate_moved(worker, until):
                    break  # a producer's open transaction: its jobs are given back
                if worker.claimer.gate.waiting or worker.book.running:
                    continue
                await worker.finisher.drained()
                if worker.book.leases:
                    await asyncio.sleep(0.01)
                    continue
                # What just ended may have put more in line.
                promoted, _ = await worker.promoter.look()
                jobs = await worker.claimer.claim(expect_work=True, most=worker.claimer.suspects.most(left))
                if not promoted and not jobs and not worker.claimer.gate.waiting:
                    break
                await worker.claimer.suspects.start(jobs, until=until)
                left = None if left is None else left - len(jobs)
                continue
            await _turn(worker, until)
        if not await worker._ended_within(_left(until), None):
            worker.runner.abort()
            await worker._ended_within(5.0, None)
        for job in [*worker.claimer.gate.give_back(), *worker.book.running.values()]:
            worker.finisher.snooze(job, timedelta(0))
        await worker._told()
    except BaseException:
        await worker.give_back()
        raise
    finally:
        await worker._close()
    counts = worker.finisher.counts
    ended = {name: counts[name] for name in ("completed", "scheduled", "cancelled", "dead")}
    ended["scheduled"] += counts["available"]  # again at once
    return DrainReport(
        sum(ended.values()), ended["completed"], ended["scheduled"], ended["cancelled"], ended["dead"], counts["moved"]
    )


async def _gate_moved(worker: Worker, until: float | None) -> bool:
    """Whether a job that was not to start yet has started or ended; it is waited for a second, not for a producer."""
    gate = worker.claimer.gate
    before = gate.waiting
    gate.moved.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(min(1.0, _left(until))):
            await gate.moved.wait()
    return gate.waiting != before


async def _turn(worker: Worker, until: float | None) -> None:
    """Let handlers run until a slot is free."""
    worker.book.changed.clear()
    if worker.book.running:
        try:
            async with asyncio.timeout(_left(until)):
                await worker.book.changed.wait()
        except TimeoutError:
            return
    else:
        await asyncio.sleep(0)


def _left(until: float | None) -> float:
    return 3600.0 * 24 if until is None else max(0.0, until - time.monotonic())
