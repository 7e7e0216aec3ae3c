"""A deadline per attempt: how its handler learns of it, how it ends, and what happens if it does not."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
import weakref
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.workers import Jobs, eventually, working
from tallybook import App, Constant, Context, JobInfo, Snooze

SOON = timedelta(seconds=0.2)
GRACE = {"abort_timeout": timedelta(seconds=0.3)}
LATER = Constant(timedelta(hours=1))


def error_of(info: JobInfo) -> dict[str, Any]:
    assert info.errors is not None
    return info.errors[-1]


async def test_an_async_handler_is_cancelled_at_its_deadline(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-19: at its deadline a handler is cancelled and sees why; the attempt fails as TimeoutError and is retried."""
    seen: list[Any] = []

    @app.task(timeout=SOON, retry=Constant(timedelta(0)), max_attempts=2)
    async def slow(ctx: Context) -> None:
        assert ctx.deadline is not None
        seen.append((ctx.cancelled, ctx.timed_out, timedelta(0) < ctx.deadline - datetime.now(UTC) <= SOON))
        try:
            await asyncio.sleep(60)
        finally:
            seen.append((ctx.cancelled, ctx.timed_out))

    job = slow.enqueue_sync(db)
    async with working(app, dsn) as worker:
        (info,) = await jobs.ends(job)
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")
    assert (info.state, info.failures, info.attempts) == ("dead", 2, 2)
    assert seen == [(False, False, True), (True, True)] * 2
    error = error_of(info)
    assert (error["type"], error["message"]) == ("TimeoutError", "deadline of 200 ms passed")
    assert "await asyncio.sleep(60)" in error["traceback"]
    assert worker.runner.abandoned == 0


async def test_a_text_is_a_timeout_too(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-19: `timeout` is a timedelta or a text; without one there is no deadline, no guard and no timer."""
    seen: list[Any] = []

    @app.task(timeout="200 ms", retry=LATER)
    async def slow() -> None:
        await asyncio.sleep(60)

    @app.task
    async def free(ctx: Context) -> None:
        seen.append((ctx.deadline, ctx.timed_out, ctx._job().guard))

    async with working(app, dsn):
        await jobs.ends(free.enqueue_sync(db))
        assert error_of(await jobs.becomes(slow.enqueue_sync(db), "retrying"))["message"] == "deadline of 200 ms passed"
    assert seen == [(None, False, None)]


async def test_timers_are_always_cleared(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-19: however an attempt ends before its deadline, its timer is cancelled: none is left in the loop."""
    retry = LATER

    @app.task(timeout="1 hour", retry=retry)
    async def on_loop(how: str) -> Any:
        if how == "waits":
            await asyncio.sleep(0)
        if how == "raises":
            raise ValueError("no luck")
        return Snooze(timedelta(hours=1)) if how == "snoozes" else None

    @app.task(timeout="1 hour", retry=retry)
    def on_thread(fails: bool) -> None:
        if fails:
            raise ValueError("no luck")

    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    real = loop.call_later

    def call_later(delay: float, *args: Any, **named: Any) -> asyncio.TimerHandle:
        timer = real(delay, *args, **named)
        if delay > 3000:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", call_later)
    calls = [on_loop.job(how) for how in ("returns", "waits", "raises", "snoozes")]
    put = app.enqueue_many_sync(db, [*calls, on_thread.job(True), on_thread.job(False)])
    async with working(app, dsn):
        for job in put:
            await jobs.becomes(job, "completed", "retrying", "scheduled")
    assert len(timers) == 6
    assert all(timer.cancelled() for timer in timers)


async def test_what_a_handler_does_in_the_grace_counts(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F26: a handler that swallows the cancel and returns completes; one that raises fails with that error."""

    @app.task(timeout=SOON, retry=LATER)
    async def swallows(then: str) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # the cancel was delivered only once, so this waits
            if then == "raises":
                raise ValueError("half done") from None
        return Snooze(timedelta(hours=1)) if then == "snoozes" else None

    @app.task(timeout=SOON, retry=LATER)
    def in_thread(ctx: Context) -> None:
        while not ctx.timed_out:
            time.sleep(0.01)
        assert ctx.cancelled

    calls = [swallows.job(then) for then in ("returns", "raises", "snoozes")]
    put = app.enqueue_many_sync(db, [*calls, in_thread.job()])
    async with working(app, dsn) as worker:
        infos = [await jobs.becomes(job, "completed", "retrying", "scheduled") for job in put]
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")
    assert [info.state for info in infos] == ["completed", "retrying", "scheduled", "completed"]
    assert (error_of(infos[1])["type"], error_of(infos[1])["message"]) == ("ValueError", "half done")
    assert "(after the deadline of 200 ms had passed)" in error_of(infos[1])["traceback"]
    late = [record for record in caplog.records if "completed after its deadline" in record.getMessage()]
    assert len(late) == 2
    assert worker.runner.abandoned == 0


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
async def test_an_async_handler_that_ignores_its_cancel_is_abandoned(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture, everything: bool
) -> None:
    """F26: past the grace the attempt fails, its slot is free, the next one runs; the coroutine closes if it can."""
    attempts: list[int] = []
    frames: list[weakref.ref[Any]] = []

    class Local:
        pass

    @app.task(timeout=SOON, retry=Constant(timedelta(0)), max_attempts=2)
    async def stubborn(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        local = Local()
        frames.append(weakref.ref(local))
        while True:
            try:
                await asyncio.sleep(60)
            except BaseException as error:
                if not everything and isinstance(error, GeneratorExit):
                    raise

    @app.task
    async def fine() -> None:
        await asyncio.sleep(0)

    job = stubborn.enqueue_sync(db)
    async with working(app, dsn, queues={"default": 1}, max_abandoned=5, **GRACE) as worker:
        (info,) = await jobs.ends(job)
        await jobs.ends(fine.enqueue_sync(db))
        left = 2 if everything else 0  # a handler that also swallows GeneratorExit cannot be closed, and counts
        await eventually(lambda: worker.runner.still_abandoned == left, "the others are gone")
    assert worker.runner.abandoned == 2
    gc.collect()
    assert sum(frame() is not None for frame in frames) == left
    assert (info.state, info.failures, attempts) == ("dead", 2, [1, 2])
    assert error_of(info)["type"] == "TimeoutError"
    assert sum("was abandoned" in record.getMessage() for record in caplog.records) == 2


async def test_a_thread_that_does_not_end_is_abandoned_and_replaced(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F25: past the grace the attempt fails, and a new thread serves the slot; the old one's end changes nothing."""
    gate, ran = threading.Event(), threading.Event()

    @app.task(timeout=SOON, retry=LATER)
    def stuck() -> None:
        gate.wait(60)
        ran.set()

    @app.task
    def fine() -> str:
        return threading.current_thread().name

    job = stuck.enqueue_sync(db)
    async with working(app, dsn, queues={"default": 1}, max_abandoned=5, **GRACE) as worker:
        info = await jobs.becomes(job, "retrying")
        assert worker.runner.still_abandoned == 1
        await jobs.ends(fine.enqueue_sync(db), fine.enqueue_sync(db))
        gate.set()
        await eventually(ran.is_set, "the abandoned thread has ended")
        await eventually(lambda: worker.runner.still_abandoned == 0, "it is counted out")
        await jobs.ends(fine.enqueue_sync(db))
        await eventually(lambda: worker.book.free == {"default": 1}, "each slot is free again")
    assert error_of(info)["message"] == "deadline of 200 ms passed"
    assert (jobs(job).state, jobs(job).failures) == ("retrying", 1)
    assert worker.finisher.counts["refused"] == 0


async def test_too_many_abandoned_handlers_stop_the_worker(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F25: `max_abandoned` abandoned handlers that still run stop the worker: it claims no more and logs why."""
    gate = threading.Event()

    @app.task(timeout=SOON, retry=LATER)
    def stuck() -> None:
        gate.wait(60)

    put = app.enqueue_many_sync(db, [stuck.job(), stuck.job(), stuck.job()])
    async with working(app, dsn, queues={"default": 1}, max_abandoned=2, **GRACE) as worker:
        await eventually(worker.claimer.stopping.is_set, "it stops")
    gate.set()
    assert worker.stopping.worn_out
    assert worker.runner.abandoned == 2
    assert [jobs(job).state for job in put] == ["retrying", "retrying", "available"]
    assert "2 abandoned handlers have not ended" in caplog.text


async def test_a_cancel_by_a_person_is_not_a_timeout(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F45: a job that a user cancels before its deadline ends as cancelled, without a failure."""

    @app.task(timeout="1 hour")
    async def slow() -> None:
        await asyncio.sleep(60)

    job = slow.enqueue_sync(db)
    async with working(app, dsn):
        await jobs.becomes(job, "running")
        app.cancel(job, "enough").sync(db)
        info = await jobs.becomes(job, "cancelled")
    assert info.failures == 0


async def test_an_abort_lets_go_of_what_ignores_it(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """F43: a handler that swallows an abort's cancel does not keep the program running: its coroutine is closed."""
    ended: list[str] = []

    @app.task
    async def stubborn() -> None:
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        finally:
            ended.append("closed")

    job = stubborn.enqueue_sync(db)
    async with working(app, dsn, **GRACE) as worker:
        await jobs.becomes(job, "running")
        worker.stop()
        worker.stop()
    await asyncio.sleep(0)
    assert ended == ["closed"]
    assert (jobs(job).state, jobs(job).failures) == ("available", 0)


@pytest.mark.slow
async def test_a_blocked_loop_is_named(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F27: a handler that blocks the loop for longer than a second is logged once, with its job and its stack.

    The heartbeat continues meanwhile: the job runs longer than the lease and is not rescued.
    """
    caplog.set_level(logging.WARNING)

    @app.task
    async def blocks(seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the mistake that this is about

    job, short = blocks.enqueue_sync(db, 3.0), blocks.enqueue_sync(db, 0.3)
    async with working(app, dsn, queues={"default": 1}):
        (info, _) = await jobs.ends(job, short)
    assert (info.state, info.attempts, info.crashes) == ("completed", 1, 0)
    (said,) = [record for record in caplog.records if "has blocked the event loop" in record.getMessage()]
    assert said.getMessage().startswith(f"blocks {job.id} has blocked the event loop for 1.")
    assert "time.sleep(seconds)" in said.getMessage()
    assert any("continues after" in record.getMessage() for record in caplog.records)


async def test_the_deadline_counts_for_hooks_too(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-19: around_job hooks see the cancel of an async handler; a plain one ends by itself; both attempts fail."""
    seen: list[str] = []

    @app.around_job
    async def around(ctx: Context) -> Any:
        try:
            yield
        except asyncio.CancelledError:
            seen.append(ctx.task)
            raise

    @app.task(timeout=SOON, retry=LATER)
    async def on_loop() -> None:
        await asyncio.sleep(60)

    @app.task(timeout=SOON, retry=LATER)
    def on_thread(ctx: Context) -> None:
        while not ctx.timed_out:
            time.sleep(0.01)
        raise TimeoutError("told")

    put = on_loop.enqueue_sync(db), on_thread.enqueue_sync(db)
    async with working(app, dsn):
        infos = [await jobs.becomes(job, "retrying") for job in put]
    assert seen == ["on_loop"]
    assert [error_of(info)["message"] for info in infos] == ["deadline of 200 ms passed", "told"]


@pytest.mark.parametrize("kind", ["cancelled", "swallows", "thread"])
@pytest.mark.direct("looks for its sessions by their name")
async def test_a_deadline_rolls_an_atomic_task_back(
    app: App, dsn: str, db: Any, jobs: Jobs, connect: Any, kind: str
) -> None:
    """S4-19 P4: at its deadline an atomic task is rolled back, abandoned or not; no connection stays in one."""
    db.execute("create table effect (n int)")
    long_enough = timedelta(seconds=1)  # for a connection that has to be made before the handler can begin

    @app.task(atomic=True, timeout=long_enough, retry=LATER)
    async def slow(tx: psycopg.AsyncConnection, swallows: bool) -> None:
        await tx.execute("insert into effect values (1)")
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if not swallows:
                    raise

    @app.task(atomic=True, timeout=long_enough, retry=LATER)
    def slow_in_thread(tx: psycopg.Connection) -> None:
        tx.execute("insert into effect values (1)")
        tx.execute("select pg_sleep(60)")

    job = slow_in_thread.enqueue_sync(db) if kind == "thread" else slow.enqueue_sync(db, kind == "swallows")
    idle = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and xact_start is not null and pid <> %s"
    )
    async with working(app, dsn, **GRACE) as worker:
        info = await jobs.becomes(job, "retrying")
        await eventually(
            lambda: db.execute(idle, (db.info.backend_pid,)).fetchone() == (0,), "no transaction is left open"
        )
        assert worker.runner.still_abandoned == 0
        assert worker.runner.abandoned == (kind == "swallows")
    assert error_of(info)["type"] in ("TimeoutError", "psycopg.errors.QueryCanceled")
    assert db.execute("select count(*) from effect").fetchone() == (0,)
