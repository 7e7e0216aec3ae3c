"""`slot_pause`: a worker's slot rests between two jobs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from support.workers import Jobs, eventually, working
from tallybook import App
from tallybook._worker.claim.shares import Shares
from tallybook._worker.jobs import Running

PAUSE = 0.2


@pytest.mark.parametrize("pause", [PAUSE, 0.0], ids=["", "control"])
async def test_a_slot_rests_between_two_jobs(app: App, dsn: str, db: Any, pause: float) -> None:
    """S3-40: a delay between two documents: each of two slots starts its next job that much later."""
    began = list[float]()

    @app.task
    async def crawl(n: int) -> None:
        began.append(time.monotonic())

    app.enqueue_many_sync(db, [crawl.job(n) for n in range(6)])
    async with working(app, dsn, {"default": 2}, slot_pause=timedelta(seconds=pause)):
        await eventually(lambda: len(began) == 6, "all have run")
    apart = [later - first for first, later in zip(began, began[2:], strict=False)]
    assert (min(apart) >= 0.95 * PAUSE) is (pause > 0)


async def test_a_stop_does_not_wait_for_a_pause(app: App, dsn: str, note: Any, db: Any, jobs: Jobs) -> None:
    """S3-40: a worker whose slots rest stops at once."""
    async with working(app, dsn, slot_pause=timedelta(hours=1)):
        await jobs.ends(note.enqueue_sync(db))
        began = time.monotonic()
    assert time.monotonic() - began < 5


async def test_a_slot_that_rests_is_given_back_once() -> None:
    """S3-40: a node's worker that ends while a slot rests gives the slot back; the pause's end does not repeat this."""
    shares = Shares({"default": 2})
    book = shares.book()
    job = Running.__new__(Running)
    job.job_id, job.queue = 1, "default"
    book.take("default", 2)
    book.rested(job)
    assert shares.free == {"default": 1}
    shares.leave(book)
    book.rested(job)
    assert shares.free == {"default": 2}
