"""When a worker claims, waits, is woken, paused, cancelled and stopped, and when its slots rest."""

import asyncio
import gc
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from support.broken import without
from support.workers import SLEEPY, Jobs, eventually, given_up, working
from tallybook import App, Context
from tallybook._worker.claim import sleeper
from tallybook._worker.claim.shares import Shares
from tallybook._worker.entry import run_worker
from tallybook._worker.jobs import Running
from tallybook._worker.life.heartbeat import Heartbeat
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ConfigError


@pytest.fixture
def held(app: App, anyio_backend: str) -> Any:
    """A task that runs until the gate opens; the jobs of it that have started, and those that were told to stop."""
    at = SimpleNamespace(gate=asyncio.Event(), started=[], told=[])

    @app.task
    async def hold(ctx: Context) -> None:
        at.started.append(ctx.job_id)
        try:
            await at.gate.wait()
        except asyncio.CancelledError:
            at.told.append(ctx.job_id)
            raise

    at.hold = hold
    return at


SLOW_BEAT = {"heartbeat": timedelta(seconds=100), "lease": timedelta(seconds=300)}
WOKEN = pytest.mark.direct("a sleeping worker is woken on its session")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SLEEPY, marks=WOKEN, id="woken"),
        pytest.param({"notify": False, "poll": timedelta(seconds=0.05)}, id="polling"),
    ],
)
async def test_an_idle_worker_starts_a_job_at_once(
    app: App, dsn: str, db: Any, jobs: Jobs, note: Any, options: Any
) -> None:
    """A commit wakes an idle worker long before its next poll; without a session the worker polls."""
    async with working(app, dsn, **options) as worker:
        for _ in range(5):
            if worker.sleeper:
                await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
            await jobs.ends(note.enqueue_sync(db))


async def test_a_job_that_comes_while_the_worker_lies_down_is_not_missed(
    app: App, dsn: str, connect: Any, jobs: Jobs, note: Any
) -> None:
    """A job is found even if its transaction looked for sleepers before the worker slept, and committed later."""
    producer = connect(autocommit=False)
    async with working(app, dsn, **SLEEPY) as worker:
        for _ in range(10):
            job = note.enqueue_sync(producer)  # whether the worker is busy or idle
            await asyncio.sleep(0.02)  # keeps the transaction open; waits for nothing
            producer.commit()
            await jobs.ends(job)
    assert worker.finisher.counts["completed"] == 10


async def test_pause_stops_claims_and_resume_wakes(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any, note: Any
) -> None:
    """A paused queue starts no more jobs, running ones continue, the other queue is served; resume wakes the worker."""
    async with working(app, dsn, queues={"default": 5, "other": 5}, **SLEEPY):
        running = held.hold.enqueue_sync(db)
        await jobs.becomes(running, "running")
        db.execute("select tallybook.pause('default')")
        waits = note.enqueue_sync(db)
        await jobs.ends(note.with_(queue="other").enqueue_sync(db))
        assert jobs(waits).state == "available"
        held.gate.set()
        await jobs.ends(running)
        await jobs.ends(note.with_(queue="other").enqueue_sync(db))
        assert jobs(waits).state == "available"
        db.execute("select tallybook.resume('default')")
        await jobs.ends(waits)


@WOKEN
async def test_a_running_job_is_told_at_once_that_it_is_cancelled(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any
) -> None:
    """A cancel reaches an async handler long before the next heartbeat, ends it, and affects no other job."""
    async with working(app, dsn, **SLEEPY, **SLOW_BEAT):
        one, other = held.hold.enqueue_sync(db), held.hold.enqueue_sync(db)
        await eventually(lambda: len(held.started) == 2, "both run")
        assert app.cancel(one, "not wanted").sync(db) == "cancelling"
        (ended,) = await jobs.ends(one)
        assert (ended.state, ended.reason, ended.failures) == ("cancelled", "not wanted", 0)
        assert (held.told, jobs(other).state) == ([one.id], "running")
        held.gate.set()
        assert (await jobs.ends(other))[0].state == "completed"


@WOKEN
async def test_a_cancel_is_told_when_the_worker_listens_again(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel that came while the worker had no listening session is told once it has one, not at the next beat."""
    listens, connect = asyncio.Event(), sleeper.connect_async

    async def connect_late(*args: Any, **options: Any) -> Any:
        await listens.wait()
        return await connect(*args, **options)

    monkeypatch.setattr(sleeper, "connect_async", connect_late)
    job = held.hold.enqueue_sync(db)
    async with working(app, dsn, **SLEEPY, **SLOW_BEAT):
        await jobs.becomes(job, "running")
        assert app.cancel(job).sync(db) == "cancelling"
        listens.set()
        assert (await jobs.ends(job))[0].state == "cancelled"


async def test_a_cancelled_job_never_starts(app: App, dsn: str, db: Any, jobs: Jobs, held: Any, note: Any) -> None:
    """A job cancelled before it starts, available or scheduled, never starts."""
    first = held.hold.enqueue_sync(db)
    late = held.hold.with_(delay="50 ms").enqueue_sync(db)
    last = note.enqueue_sync(db)
    assert [app.cancel(job).sync(db) for job in (first, late)] == ["cancelled", "cancelled"]
    async with working(app, dsn):
        await jobs.ends(last)
        await eventually(lambda: not db.execute("select from tallybook.scheduled").fetchall(), "it was promoted")
        await jobs.ends(note.enqueue_sync(db))
        assert [jobs(job).state for job in (first, late)] == ["cancelled", "cancelled"]
    assert held.started == []


async def test_told_before_its_handler_began_it_does_not_begin(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A claimed job that has not begun when the cancel arrives ends as cancelled, without a start."""
    started: list[int] = []

    @app.task
    async def note(n: int) -> None:
        started.append(n)
        if n == 0:  # the first of its batch: the others follow in the same turn of the loop
            for job in worker.book.running.values():
                if job.job_id != put[0].id:
                    worker.runner.cancel(job.job_id, "not wanted")

    put = app.enqueue_many_sync(db, [note.job(n) for n in range(4)])
    async with working(app, dsn) as worker:
        ended = await jobs.ends(*put)
    assert started == [0]
    assert [job.state for job in ended] == ["completed", *["cancelled"] * 3]


async def test_a_handler_may_refuse_to_be_cancelled(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A handler that catches the cancellation and returns completes; all slots are free then."""
    gate = asyncio.Event()

    @app.task
    async def stubborn() -> None:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)

    async with working(app, dsn) as worker:
        job = stubborn.enqueue_sync(db)
        await jobs.becomes(job, "running")
        await eventually(lambda: worker.book.running, "it runs")
        app.cancel(job).sync(db)
        assert (await jobs.ends(job))[0].state == "completed"
        await eventually(lambda: worker.book.free == {"default": 10}, "its slot is free")


async def test_a_plain_handler_keeps_its_job_until_it_returns(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A thread cannot be cancelled: until its code ends, the job runs and its unique key is taken.

    ctx.cancelled shows the handler the cancel; the job ends as cancelled or completed.
    """
    told, go_on = threading.Event(), threading.Event()

    @app.task
    def slow(ctx: Context) -> None:
        while not ctx.cancelled:
            if go_on.wait(0.01):
                return
        told.set()
        go_on.wait(10)

    async with working(app, dsn) as worker:
        job = slow.with_(unique="one").enqueue_sync(db)
        await jobs.becomes(job, "running")
        await eventually(lambda: worker.book.running, "it runs")
        app.cancel(job).sync(db)
        await eventually(told.is_set, "the handler sees ctx.cancelled")
        try:
            assert jobs(job).state == "running"
            assert slow.with_(unique="one").enqueue_sync(db).created is False
            assert list(worker.book.running) == [job.id]
        finally:
            go_on.set()
        assert (await jobs.ends(job))[0].state in ("cancelled", "completed")


@WOKEN
async def test_stop_with_nothing_running_ends_quickly(app: App, dsn: str, note: Any) -> None:
    """A sleeping worker stops within 2 s."""
    async with working(app, dsn, **SLEEPY) as worker:
        await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
        began = time.monotonic()
    assert time.monotonic() - began < 2


async def test_stop_finishes_what_runs_and_claims_nothing_more(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any, note: Any
) -> None:
    """After a stop, running jobs end as usual, and later ones stay available for another worker."""
    async with working(app, dsn) as worker:
        running = held.hold.enqueue_sync(db)
        await eventually(lambda: held.started and worker.claimer.asleep, "it runs, and no claim is on its way")
        worker.stop()
        later = note.enqueue_sync(db)
        assert jobs(running).state == "running"
        held.gate.set()
    assert (jobs(running).state, jobs(later).state) == ("completed", "available")
    assert db.execute("select count(*) from tallybook.worker where ended_at is null").fetchone() == (0,)


async def test_a_second_stop_gives_running_jobs_back_at_once(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any
) -> None:
    """An abort cancels handlers; their jobs are available at once, without a failure or crash; no other job starts."""
    async with working(app, dsn, queues={"default": 2}) as worker:
        put = [held.hold.enqueue_sync(db) for _ in range(4)]
        await eventually(lambda: len(held.started) == 2, "two run")
        worker.stop()
        worker.stop()
    infos = [jobs(job) for job in put]
    assert [(info.state, info.failures, info.crashes) for info in infos] == [("available", 0, 0)] * 4
    assert len(held.told) == 2
    held.gate.set()
    async with working(app, dsn):
        await jobs.ends(*put)
    assert len(held.started) == 6


async def test_a_stop_counts_the_ends_that_it_could_not_store(
    app: App, dsn: str, db: Any, connect: Any, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The count covers ends that were sent and not answered."""
    with connect(autocommit=False) as blocker:
        blocker.execute("lock table tallybook.outcome in share mode")
        async with working(app, dsn, abort_timeout=timedelta(seconds=0.2)) as worker:
            for _ in range(2):
                note.enqueue_sync(db)
            await eventually(lambda: worker.claimer.claimed == 2 and not worker.book.running, "both have run")
        assert "2 outcomes could not be sent" in caplog.text


async def test_abort_does_not_wait_for_a_thread(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """An abort leaves a plain handler behind after abort_timeout; its job is given back."""
    gate = threading.Event()

    @app.task
    def stuck() -> None:
        gate.wait(20)

    try:
        async with working(app, dsn, abort_timeout=timedelta(seconds=0.3)) as worker:
            job = stuck.enqueue_sync(db)
            await jobs.becomes(job, "running")
            await eventually(lambda: worker.book.running, "it runs")
            worker.stop()
            worker.stop()
        info = jobs(job)
        assert (info.state, info.failures, info.crashes) == ("available", 0, 0)
    finally:
        gate.set()


async def test_an_abandoned_job_is_counted_once(app: App, dsn: str, db: Any) -> None:
    """The report counts a job as given back once, although its handler did not end."""
    gate = threading.Event()

    @app.task
    def stuck() -> None:
        gate.wait(20)

    stuck.enqueue_sync(db)
    worker = Worker(app, dsn, WorkerSettings(queues={"default": 1}, abort_timeout=timedelta(seconds=0.3)))
    life = asyncio.create_task(worker.run())
    try:
        await eventually(lambda: worker.book.running, "it runs")
        worker.stop()
        worker.stop()
        assert (await life).released == 1
    finally:
        gate.set()


@pytest.mark.slow
async def test_a_handler_that_blocks_the_loop_keeps_its_jobs(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A handler that blocks the event loop for longer than the lease does not lose its job to another worker."""

    class OtherWorker(threading.Thread):
        """Rescues with a lease of 2 s, again and again, in its own thread."""

        def __init__(self, dsn: str) -> None:
            super().__init__(daemon=True)
            self.dsn, self.rescued, self._over = dsn, 0, threading.Event()
            self.start()

        def run(self) -> None:
            import psycopg

            with psycopg.connect(self.dsn, autocommit=True) as conn:
                while not self._over.wait(0.1):
                    row = conn.execute("select lost from tallybook.rescue('2 s')").fetchone()
                    self.rescued += row[0] if row else 0

        def stop(self) -> None:
            self._over.set()
            self.join()

    ran: list[int] = []

    @app.task
    async def blocks(ctx: Context) -> None:
        ran.append(ctx.attempt)
        time.sleep(3.5)  # noqa: ASYNC251  it is what this test is about; the lease is 2 s

    job = blocks.enqueue_sync(db)
    other = OtherWorker(dsn)
    async with working(app, dsn):
        (ended,) = await jobs.ends(job)
    other.stop()
    assert (ended.state, ended.attempts, ended.crashes, ran) == ("completed", 1, 0, [1])
    assert other.rescued == 0


async def test_an_attempt_that_was_lost_does_not_hide_the_next(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A given-up worker that claims its own job again keeps the new attempt when the old one ends."""
    gates = {1: asyncio.Event(), 2: asyncio.Event()}
    began: list[int] = []
    over: list[int] = []

    @app.task
    async def stubborn(ctx: Context) -> None:
        began.append(ctx.attempt)
        try:
            await gates[ctx.attempt].wait()
        except asyncio.CancelledError:
            await gates[ctx.attempt].wait()  # as bad handlers do
        over.append(ctx.attempt)

    async with working(app, dsn, **SLEEPY) as worker:
        job = stubborn.enqueue_sync(db)
        await eventually(lambda: began == [1], "it runs")
        assert worker.heartbeat is not None
        await given_up(db, worker.heartbeat.worker_id)
        await eventually(lambda: began == [1, 2], "it runs again")
        gates[1].set()
        await eventually(lambda: over == [1], "the lost attempt is over")
        assert [running.attempt for running in worker.book.running.values()] == [2]
        worker.stop()
        gates[2].set()
    info = jobs(job)
    assert (info.state, info.attempts, info.crashes) == ("completed", 2, 1)


async def test_nothing_of_a_stopped_worker_stays_on_record(app: App, dsn: str, db: Any) -> None:
    """A heartbeat in flight while the worker stops does not register it again."""
    fast = {"heartbeat": timedelta(milliseconds=2), "lease": timedelta(seconds=2)}
    for _ in range(8):
        async with working(app, dsn, **fast) as worker:
            await eventually(lambda: worker.heartbeat and worker.heartbeat.worker_id, "it is on record")
    on_record = "select count(*), count(*) filter (where ended_at is null) from tallybook.worker"
    assert db.execute(on_record).fetchone() == (8, 0)


async def test_a_worker_stops_when_its_heartbeat_fails(
    app: App, dsn: str, db: Any, jobs: Jobs, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unexpected error in the heartbeat's thread it claims no more, ends its job and fails with that error."""
    beat = Heartbeat._beat

    def broken(self: Heartbeat) -> None:
        if held.started:
            raise ZeroDivisionError("in a beat")
        beat(self)

    monkeypatch.setattr(Heartbeat, "_beat", broken)
    with pytest.raises(ZeroDivisionError, match="in a beat"):
        async with working(app, dsn) as worker:
            running = held.hold.enqueue_sync(db)
            await eventually(worker.claimer.stopping.is_set, "it stops")
            held.gate.set()
            (ended,) = await jobs.ends(running)
    assert (ended.state, ended.attempts) == ("completed", 1)


async def test_a_start_that_fails_leaves_no_connection(app: App, dsn: str, db: Any) -> None:
    """A worker that finds an undeclared limit raises, and its sessions end without the garbage collector."""

    @app.task(limits=("nowhere",))
    async def limited() -> None: ...

    gc.disable()
    try:
        with pytest.raises(ConfigError, match="nowhere"):
            await run_worker(app, dsn=dsn, install_signals=False)
        others = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        await eventually(lambda: db.execute(others).fetchone() == (0,), "its sessions have ended")
    finally:
        gc.enable()


async def test_a_background_task_that_loses_a_cancel_is_cancelled_again(app: App, dsn: str) -> None:
    """A worker ends even if a cancel is lost, as psycopg 3.2 can lose one on Python 3.11."""

    async def deaf() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with working(app, dsn) as worker:
        worker._background.start(deaf(), "deaf")


async def test_ends_are_on_record_though_their_permits_cannot_be_passed_on(
    app: App, dsn: str, db: Any, jobs: Jobs, note: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """S1-18: an error in the release undoes no end and stops no worker: the service releases the waiting jobs."""
    db.execute("select tallybook.concurrency_limit_set('task:note', 1)")
    guard = "perform tallybook._read_committed("
    without(db, "concurrency_release", guard, f"if quiet <> '{{}}' then raise exception 'broken'; end if; {guard}")
    async with working(app, dsn):
        await jobs.ends(*[note.enqueue_sync(db) for _ in range(3)])
    assert "released later: broken" in caplog.text


@pytest.mark.parametrize("pause", [0.2, 0.0], ids=["", "control"])
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
    assert (min(apart) >= 0.95 * 0.2) is (pause > 0)


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
