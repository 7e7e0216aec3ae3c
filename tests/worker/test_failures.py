"""The record of a failure: of any exception, with a real worker on a real PostgreSQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.workers import Jobs, eventually, working
from tallybook import App, Constant


@pytest.mark.parametrize("how", ["on the loop", "on a thread"])
async def test_any_exception_is_kept_as_a_failure(app: App, dsn: str, db: Any, jobs: Jobs, how: str) -> None:
    """F29: an exception that cannot be shown, in whatever way, fails its job with a record; the worker continues."""

    class Hostile(Exception):
        """Any use of it ends the program."""

        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(3)

        def __str__(self) -> str:
            raise KeyboardInterrupt

        __repr__ = __str__

    def _deep() -> Exception:
        error: Exception = ValueError("0")
        for number in range(1, 3000):
            newer = ValueError(str(number))
            newer.__context__ = error
            error = newer
        return error

    hostile = {
        "unprintable": Hostile,
        "SystemExit": lambda: SystemExit(1),
        "KeyboardInterrupt": KeyboardInterrupt,
        "a base group": lambda: BaseExceptionGroup("x", [SystemExit(1), Hostile()]),
        "a long chain": _deep,
        "ten megabytes, NUL and a lone surrogate": lambda: ValueError("\0\ud800" * 3_000_000),
    }
    hour = timedelta(hours=1)

    async def on_loop(kind: str) -> None:
        raise hostile[kind]()

    def on_thread(kind: str) -> None:
        raise hostile[kind]()

    odd = app.task(retry=Constant(hour), no_retry=LookupError)(on_loop if how == "on the loop" else on_thread)

    @app.task
    async def fine() -> None:
        pass

    async with working(app, dsn) as worker:
        for kind in hostile:
            info = await jobs.becomes(odd.enqueue_sync(db, kind), "retrying")
            await jobs.ends(fine.enqueue_sync(db))
            await eventually(lambda: worker.book.free == {"default": 10}, "all slots are free")
            assert info.failures == 1, kind
            (error,) = info.errors or [{}]
            assert error["type"] and "traceback" in error and error["attempt"] == 1, kind
    assert db.execute("select max(octet_length(errors::text)) < 18000 from tallybook.job").fetchone() == (True,)


async def test_each_failure_is_kept_with_when_and_where(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-13: type, message, traceback, attempt, worker, start and end of a failure are kept, also in view attempt."""
    now = Constant(timedelta(0))
    second = timedelta(seconds=1)
    ran: list[tuple[datetime, datetime]] = []

    @app.task(retry=now, max_attempts=2)
    async def broken() -> None:
        began = datetime.now(UTC)
        await asyncio.sleep(0.05)
        ran.append((began, datetime.now(UTC)))
        raise ValueError(f"no luck {len(ran)}")

    job = broken.enqueue_sync(db)
    async with working(app, dsn, name="w1"):
        (info,) = await jobs.ends(job)
    errors = info.errors or []
    assert [(error["type"], error["message"], error["attempt"], error["worker"]) for error in errors] == [
        ("ValueError", "no luck 1", 1, "w1"),
        ("ValueError", "no luck 2", 2, "w1"),
    ]
    for error, (began, ended) in zip(errors, ran, strict=True):
        assert datetime.fromisoformat(error["started_at"]) <= began < ended <= datetime.fromisoformat(error["at"])
        assert "raise ValueError" in error["traceback"]
    rows = db.execute(
        "select started_at, ended_at, worker, error from tallybook.attempt where job_id = %s order by attempt", [job.id]
    ).fetchall()
    assert [row[3] for row in rows] == errors
    for started_at, ended_at, worker, error in rows:
        assert worker == "w1"
        assert started_at == datetime.fromisoformat(error["started_at"])
        assert abs(ended_at - datetime.fromisoformat(error["at"])) < second
