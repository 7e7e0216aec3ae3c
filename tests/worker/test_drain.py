"""Drain: run all due jobs, once, and return: for routes that cron calls, and for tests."""

import asyncio
import gc
import time
from datetime import timedelta
from typing import Any

import pytest

from support.proxy import Proxy
from support.workers import Jobs, eventually
from tallybook import App, Constant, Context, Snooze
from tallybook._worker.life.drain import drain as _drain
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import QueueUnavailable


async def test_drain_runs_what_is_due_and_never_waits(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-07 S5-09: drain runs all due jobs, and those that they enqueue, without waiting; jobs due later stay."""
    hour = timedelta(hours=1)

    @app.task(retry=Constant(hour), max_attempts=2)
    async def various(kind: str) -> Any:
        match kind:
            case "follow":
                await various.enqueue(app, "fine")
            case "fail":
                raise ValueError
            case "snooze":
                return Snooze(hour)

    app.dsn = dsn
    for kind in ("fine", "follow", "fail", "snooze"):
        various.enqueue_sync(db, kind)
    various.with_(max_attempts=1).enqueue_sync(db, "fail")
    various.with_(delay=hour).enqueue_sync(db, "fine")
    db.execute("select tallybook.enqueue('default', 'unheard_of')")
    report = await app.drain(dsn=dsn)
    assert (report.processed, report.completed, report.retrying, report.dead, report.moved) == (6, 3, 2, 1, 1)
    async with asyncio.timeout(60):  # otherwise it would wait for an hour
        assert (await app.drain(dsn=dsn)).processed == 0
    assert db.execute("select count(*) from tallybook.worker where ended_at is null").fetchone() == (0,)


@pytest.mark.parametrize("again", [False, True], ids=["completing", "snoozing"])
async def test_drain_runs_at_most_so_many_jobs(app: App, dsn: str, db: Any, again: bool) -> None:
    """S4-07: max_jobs is never exceeded, even by jobs that are due again at once; the next drain continues."""
    ran: list[int] = []

    @app.task
    async def note(ctx: Context) -> Any:
        ran.append(ctx.job_id)
        return Snooze(timedelta(0)) if again else None

    app.enqueue_many_sync(db, [note.job() for _ in range(25)] if not again else [note.job()])
    for most in (7, 14):  # fewer than there are slots
        await app.drain(dsn=dsn, max_jobs=7)
        assert len(ran) == most


async def test_a_drain_leaves_nothing_open(app: App, dsn: str, recwarn: pytest.WarningsRecorder) -> None:
    """A drain closes its sockets and connections, so a test suite in which warnings are errors passes."""
    await app.drain(dsn=dsn)
    gc.collect()
    assert [str(one.message) for one in recwarn if one.category is ResourceWarning] == []


@pytest.mark.direct("counts the sessions of a drain")
async def test_a_drain_needs_three_sessions(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """For claims, for heartbeats, and one for ends and maintenance; a worker has one more."""
    open_ones = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    seen: list[int] = []

    @app.task
    async def first() -> None: ...

    @app.task
    async def second() -> None:
        await jobs.becomes(before, "completed")
        seen.append(db.execute(open_ones).fetchone()[0])

    before = first.enqueue_sync(db)
    second.enqueue_sync(db)
    await app.drain(dsn=dsn)
    assert seen == [3]


async def test_drain_ends_in_time(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """max_seconds ends a drain that would continue; the interrupted job is given back without a failure."""

    @app.task
    async def hold() -> None:
        await asyncio.Event().wait()

    job = hold.enqueue_sync(db)
    began = time.monotonic()
    await app.drain(dsn=dsn, max_seconds=timedelta(seconds=0.5))
    assert 0.4 < time.monotonic() - began < 5
    info = jobs(job)
    assert (info.state, info.failures, info.crashes) == ("available", 0, 0)


async def test_drain_waits_for_a_server_for_a_limited_time(app: App) -> None:
    """A drain that cannot reach the server within max_seconds raises QueueUnavailable."""

    @app.task
    async def note() -> None:
        pass

    async with asyncio.timeout(30):
        with pytest.raises(QueueUnavailable):
            await app.drain(dsn="host=127.0.0.1 port=1 user=nobody", max_seconds=0.3)


@pytest.mark.parametrize("at", [b"claimed_jobs", b"promote"])
async def test_drain_waits_for_a_server_that_leaves_for_a_limited_time(app: App, dsn: str, db: Any, at: bytes) -> None:
    """A drain whose server leaves in the middle raises QueueUnavailable at max_seconds, whatever it waits for."""

    @app.task
    async def note() -> None:
        proxy.cut_at(at)
        proxy.refusing = True

    note.enqueue_sync(db)
    with Proxy(dsn) as proxy:
        async with asyncio.timeout(30):
            with pytest.raises(QueueUnavailable):
                await app.drain(dsn=proxy.dsn, max_seconds=1)


async def test_a_claim_without_an_answer_holds_up_a_drain_for_a_limited_time(app: App, dsn: str, db: Any) -> None:
    """If the server does not answer a claim, the drain stops waiting `abort_timeout` after its limit."""

    @app.task
    async def note() -> None:
        proxy.silent = True

    note.enqueue_sync(db)
    settings = WorkerSettings(queues={"default": 1}, notify=False, abort_timeout=timedelta(seconds=0.2))
    with Proxy(dsn) as proxy:
        draining = asyncio.create_task(_drain(app, proxy.dsn, settings, None, 1.5))
        await eventually(lambda: proxy.silent and len(proxy._open) < 6, "the claims are cut", seconds=10)
        proxy.silent = False
        with pytest.raises(QueueUnavailable):
            await draining


async def test_two_drains_at_once_run_each_job_once(app: App, dsn: str, db: Any) -> None:
    """S4-07 S1-10: concurrent drains, as when cron calls a route twice, run each job once."""
    ran: list[int] = []

    @app.task
    async def note(n: int) -> None:
        ran.append(n)
        await asyncio.sleep(0)

    app.enqueue_many_sync(db, [note.job(n) for n in range(300)])
    reports = await asyncio.gather(*[app.drain(dsn=dsn) for _ in range(3)])
    assert sorted(ran) == list(range(300))
    assert sum(report.completed for report in reports) == 300
