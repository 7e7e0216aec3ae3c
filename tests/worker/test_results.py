"""Results, progress and checkpoints of jobs, while they run and when they have ended."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.workers import Jobs, eventually, working
from tallybook import App, Cancel, Constant, Context, Dead
from tallybook._worker.finish import finisher
from tallybook.errors import JobCancelled, JobDied, LeaseLost, ResultMissing, ResultTimeout, UnknownJob
from tallybook.testing import drain_async


@pytest.fixture
def app(dsn: str) -> App:
    return App("shop", dsn=dsn)


@pytest.mark.servers
async def test_a_result_is_kept_and_comes_back_as_annotated(app: App, dsn: str, db: Any) -> None:
    """S4-17: complete stores the handler's return value; app.result returns it with the annotated type."""

    @dataclass
    class Price:
        amount: int
        at: datetime

    @app.task
    async def quote(symbol: str) -> Price:
        return Price(284750, datetime(2026, 1, 2, tzinfo=UTC))

    @app.task
    def nothing() -> None:
        pass

    @app.task(store_result=False)
    def secret() -> str:
        return "not kept"

    job, none, kept_back = quote.enqueue_sync(db, "INFY"), nothing.enqueue_sync(db), secret.enqueue_sync(db)
    await drain_async(app, dsn=dsn)
    assert await app.result(job) == Price(284750, datetime(2026, 1, 2, tzinfo=UTC))
    assert await App("elsewhere", dsn=dsn).result(job.id) == {"amount": 284750, "at": "2026-01-02T00:00:00+00:00"}
    assert await app.result(none) is None and await app.result(kept_back) is None
    assert db.execute("select result from tallybook.job where id = %s", (job.id,)).fetchone()[0]["amount"] == 284750
    assert db.execute("select count(*) from tallybook.outcome where result is not null").fetchone() == (1,)


async def test_large_results_are_stored_in_several_statements(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush ends with the job whose result passes the limit, so that no statement is too large for the server."""
    monkeypatch.setattr(finisher, "_MOST_RESULTS", 100)
    flushes: list[int] = []
    flush, gate = finisher.Finisher._flush_completed, asyncio.Event()

    async def watched(self: Any, conn: Any, some: list[Any], *, release: bool) -> bool:
        flushes.append(len(some))
        return await flush(self, conn, some, release=release)

    monkeypatch.setattr(finisher.Finisher, "_flush_completed", watched)

    @app.task
    async def big() -> str:
        await gate.wait()
        return "x" * 60

    put = [big.enqueue_sync(db) for _ in range(6)]
    async with working(app, dsn) as worker:
        await eventually(lambda: len(worker.book.running) == 6, "all run")
        gate.set()
        assert {job.state for job in await jobs.ends(*put)} == {"completed"}
    assert sum(flushes) == 6 and max(flushes) == 2


async def test_whoever_waits_gets_the_result_when_the_job_has_ended(app: App, dsn: str, db: Any) -> None:
    """S3-40 S4-17: app.result waits for a job that has not ended, and returns its result."""

    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    job = add.enqueue_sync(db, 1, 2)
    waiting = asyncio.create_task(app.result(job, timeout="20 s"))
    await asyncio.sleep(0)
    await drain_async(app, dsn=dsn)
    assert await waiting == 3


async def test_who_waits_is_told_why_there_is_no_result(app: App, dsn: str, db: Any) -> None:
    """S4-17: not committed, not ended in time, dead, cancelled, not storable: app.result has an error for each."""

    @app.task(max_attempts=1)
    async def ends(how: str) -> Any:
        match how:
            case "raises":
                raise ValueError("no such user")
            case "dead":
                return Dead("given up")
            case "cancel":
                return Cancel("not needed")
            case "large":
                return "x" * 1_000_001
            case _:
                return object()

    jobs = {how: ends.enqueue_sync(db, how) for how in ("raises", "dead", "cancel", "large", "strange")}
    with pytest.raises(ResultTimeout, match=r"has not ended within 0.02 s"):
        await app.result(jobs["raises"], timeout=timedelta(seconds=0.02))
    await drain_async(app, dsn=dsn)
    with pytest.raises(JobDied, match="ValueError: no such user") as died:
        await app.result(jobs["raises"])
    assert (died.value.job, died.value.error_type) == (jobs["raises"].id, "ValueError")
    with pytest.raises(JobDied, match="given up"):
        await app.result(jobs["dead"])
    with pytest.raises(JobCancelled, match="not needed"):
        await app.result(jobs["cancel"])
    for how in ("large", "strange"):  # its work is done: it completes, and does not run again for its result
        with pytest.raises(ResultMissing, match="its result was not kept"):
            await app.result(jobs[how])
        assert (await app.get(jobs[how])).state == "completed"
    with pytest.raises(UnknownJob):
        await app.result(4711)
    with db.transaction():
        unseen = ends.enqueue_sync(db, "raises")
        with pytest.raises(UnknownJob, match="never committed"):
            await app.result(unseen)
    db.execute("select tallybook.cancel(%s, 'too late')", (unseen.id,))
    with pytest.raises(JobCancelled, match="too late"):
        await app.result(unseen)


async def test_progress_is_on_view_and_a_checkpoint_survives_a_retry(app: App, dsn: str, db: Any) -> None:
    """A handler reports its progress; the next attempt continues from the checkpoint before the failure."""
    began: list[int] = []

    @app.task(retry=Constant(timedelta(0)))
    async def import_rows(ctx: Context, rows: int) -> int:
        start = (await ctx.get_checkpoint() or {"row": 0})["row"]
        began.append(start)
        for row in range(start, rows):
            await ctx.set_checkpoint({"row": row + 1})
            await ctx.progress((row + 1) / rows, f"row {row + 1} of {rows}")
            if row == 1 and ctx.attempt == 1:
                raise ConnectionError("the disk is away")
        return rows

    job = import_rows.enqueue_sync(db, 4)
    await drain_async(app, dsn=dsn)
    found = await app.get(job)
    assert began == [0, 2]
    assert (found.state, found.progress, found.progress_message, found.result) == ("completed", 1.0, "row 4 of 4", 4)


async def test_a_plain_handler_says_the_same_from_its_thread(app: App, dsn: str, db: Any) -> None:
    """The _sync forms are for threads; an async handler that uses one gets an error."""
    told: list[BaseException] = []

    @app.task
    def plain(ctx: Context) -> None:
        ctx.progress_sync(0.5, "half")
        ctx.set_checkpoint_sync([1, 2])
        assert ctx.get_checkpoint_sync() == [1, 2]

    @app.task
    async def wrong(ctx: Context) -> None:
        try:
            ctx.progress_sync(0.5)
        except RuntimeError as error:
            told.append(error)

    job = plain.enqueue_sync(db)
    wrong.enqueue_sync(db)
    await drain_async(app, dsn=dsn)
    assert (await app.get(job)).progress == 0.5
    assert "await" in str(told[0])


async def test_who_lost_its_attempt_cannot_write_progress(app: App, dsn: str, db: Any) -> None:
    """P5 F8: progress and checkpoints of a lost attempt are refused."""
    lost: list[str] = []

    def given_to_another() -> bool:
        with db.transaction():  # so that no heartbeat comes between
            db.execute("select tallybook.rescue(at => now() + interval '1 hour')")
            db.execute("select tallybook.rescue(at => now() + interval '2 hours')")
        row = db.execute("select count(*) from tallybook.outcome where state = 'lost'").fetchone()
        return bool(row == (1,))

    @app.task
    async def zombie(ctx: Context) -> None:
        if ctx.attempt == 1:
            await ctx.set_checkpoint("of the first")
            await eventually(given_to_another, "the attempt is lost")
            for say in (ctx.progress(1.0), ctx.set_checkpoint("of a zombie")):
                try:
                    await say
                except LeaseLost:
                    lost.append("refused")

    job = zombie.enqueue_sync(db)
    await drain_async(app, dsn=dsn)
    assert lost == ["refused", "refused"]
    assert db.execute("select tallybook.checkpoint_of(%s)", (job.id,)).fetchone() == ("of the first",)
    assert db.execute("select progress from tallybook.job where id = %s", (job.id,)).fetchone() == (None,)
