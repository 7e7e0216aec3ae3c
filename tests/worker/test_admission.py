"""Jobs that a worker must not start yet: an open transaction changes them, or a job of the same key runs."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from support.database import Connect
from support.hands import put
from support.workers import Jobs, eventually, given_up, working
from tallybook import App, Context
from tallybook._db.ends import UNCLAIM

REPLACE: dict[str, Any] = {"task": "note", "unique_key": "k", "on_conflict": "replace_args"}


class Handlers:
    """A task that records its args, and one that runs until the test lets it end."""

    def __init__(self, app: App) -> None:
        self.ran: list[tuple[int, int]] = []
        self.running: list[int] = []
        self.overlaps: list[tuple[int, ...]] = []
        self.go_on = asyncio.Event()

        @app.task(name="note")
        async def note(ctx: Context, n: int = 0) -> None:
            self.ran.append((ctx.job_id, n))

        @app.task(name="hold")
        async def hold(ctx: Context) -> None:
            self.running.append(ctx.job_id)
            if len(self.running) > 1:
                self.overlaps.append(tuple(self.running))
            self.ran.append((ctx.job_id, 0))
            try:
                await self.go_on.wait()
            finally:
                self.running.remove(ctx.job_id)


@pytest.fixture
def handlers(app: App, anyio_backend: str) -> Handlers:
    return Handlers(app)


async def test_a_held_job_starts_with_the_new_args(
    app: App, dsn: str, db: Any, connect: Connect, handlers: Handlers, jobs: Jobs
) -> None:
    """S1-07: its batch starts without it; after the producer's commit it runs once, with the new args."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    others = [put(db, task="note", args={"n": 7}) for _ in range(2)]
    async with working(app, dsn, "q") as worker:
        await jobs.ends(*others)
        assert worker.claimer.admission.waiting == 1
        producer.commit()
        await jobs.ends(job)
    assert sorted(handlers.ran) == sorted([(job, 2), *((other, 7) for other in others)])


async def test_a_worker_that_stops_gives_held_jobs_back(
    app: App, dsn: str, db: Any, connect: Connect, handlers: Handlers, jobs: Jobs
) -> None:
    """P9: its stop does not wait for the producer, and the next worker runs the job with the new args."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    async with working(app, dsn, "q") as worker:
        await eventually(lambda: worker.claimer.admission.waiting, "it is held")
    assert jobs(job).state == "available"
    producer.commit()
    async with working(app, dsn, "q"):
        await jobs.ends(job)
    assert handlers.ran == [(job, 2)]


async def test_a_worker_that_was_given_up_starts_no_held_job(
    app: App, dsn: str, db: Any, connect: Connect, handlers: Handlers, jobs: Jobs
) -> None:
    """P5: its held job is given up; it returns with all its slots, and its watermark advances."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    async with working(app, dsn, "q=3") as worker:
        await eventually(lambda: worker.claimer.admission.waiting, "it is held")
        first = worker.heartbeat.worker_id if worker.heartbeat else 0
        await given_up(db, first)
        await eventually(lambda: worker.heartbeat and worker.heartbeat.worker_id != first, "it is back")
        await eventually(lambda: worker.claimer.admission.waiting, "it has claimed the job again")
        assert worker.book.free["q"] == 2
        assert len(worker.book.leases) == 1
        producer.commit()
        await jobs.ends(job)
        await eventually(lambda: worker.book.free["q"] == 3 and not worker.book.leases, "nothing is open")
    assert handlers.ran == [(job, 2)]
    assert jobs(job).attempt == 2


async def test_one_of_a_key_runs_at_a_time(app: App, dsn: str, db: Any, handlers: Handlers, jobs: Jobs) -> None:
    """Two workers with many slots run them in order; the waiting ones hold no slot."""
    ids = [put(db, task="hold", order_key="k") for _ in range(5)]
    async with working(app, dsn, "q=10") as one, working(app, dsn, "q=10") as two:
        await eventually(lambda: handlers.running, "the first runs")
        await jobs.becomes(ids[-1], "waiting")
        await eventually(lambda: one.book.free["q"] + two.book.free["q"] == 19, "the others hold no slot")
        handlers.go_on.set()
        await jobs.ends(*ids)
    assert [job for job, _ in handlers.ran] == ids
    assert not handlers.overlaps


async def test_an_open_transaction_behind_a_key_costs_no_slot(
    app: App, dsn: str, db: Any, connect: Connect, handlers: Handlers, jobs: Jobs
) -> None:
    """While an open transaction holds a key's lock, the key's jobs are set aside after a moment, and others run."""
    somebody = connect(autocommit=False)
    somebody.execute("select pg_advisory_xact_lock(1413565448, hashtext('k'))")
    ordered = [put(db, task="note", order_key="k") for _ in range(2)]
    async with working(app, dsn, "q=2"):
        await jobs.becomes(ordered[0], "waiting")
        other = put(db, task="note", order_key="another")
        await jobs.ends(other)
        somebody.commit()
        await jobs.ends(*ordered)
    assert [job for job, _ in handlers.ran] == [other, *ordered]


async def test_a_drain_does_not_wait_for_a_producer(
    app: App, dsn: str, db: Any, connect: Connect, handlers: Handlers, jobs: Jobs
) -> None:
    """A drain ends without the held job, counts only what it ran, and runs all jobs of an order key."""
    job = put(db, **{**REPLACE, "args": {"n": 1}})
    producer = connect(autocommit=False)
    put(producer, **{**REPLACE, "args": {"n": 2}})
    line = [put(db, task="note", order_key="k") for _ in range(3)]
    async with asyncio.timeout(30):
        report = await app.drain(dsn=dsn, queues="q")
    assert (report.processed, report.completed) == (3, 3)
    assert [ran for ran, _ in handlers.ran] == line
    assert jobs(job).state == "available"


async def test_max_jobs_counts_jobs_that_had_to_wait_for_their_turn(
    app: App, dsn: str, db: Any, handlers: Handlers
) -> None:
    """A drain of two runs two, though jobs with an order key start later than they are claimed."""
    for n in range(4):
        put(db, task="note", order_key=f"k{n}")
    report = await app.drain(dsn=dsn, queues="q", max_jobs=2)
    assert (report.completed, len(handlers.ran)) == (2, 2)


async def test_an_expired_job_is_not_started(app: App, dsn: str, db: Any, handlers: Handlers, jobs: Jobs) -> None:
    """It is dead with the reason expired, and its key's next job runs."""

    def _past(db: Any) -> Any:
        return db.execute("select clock_timestamp() - interval '1 s'").fetchone()[0]

    late = put(db, task="note", order_key="k", expires_at=_past(db))
    next_one = put(db, task="note", order_key="k")
    async with working(app, dsn, "q", poll=timedelta(milliseconds=50)):
        await jobs.ends(late, next_one)
    assert (jobs(late).state, jobs(late).reason) == ("dead", "expired")
    assert [job for job, _ in handlers.ran] == [next_one]


async def test_a_job_whose_claim_was_undone_frees_its_slot_once(
    app: App, dsn: str, db: Any, handlers: Handlers, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is claimed again before the first question about it is answered: it runs once and has one slot."""
    async with working(app, dsn, "q=3") as worker:
        admission, questions, go_on = worker.claimer.admission, [], asyncio.Event()
        ask = admission._ask

        async def first_is_slow(name: str, params: Any) -> Any:
            questions.append(name)
            if len(questions) == 1:
                await go_on.wait()
            return await ask(name, params)

        monkeypatch.setattr(admission, "_ask", first_is_slow)
        job = put(db, task="note", order_key="k")
        await eventually(lambda: questions, "it is in the admission")
        lease = admission._waiting[job].lease.lease
        db.execute(UNCLAIM.worker, (lease, job, 1, timedelta(0)))  # as if a crash of the server had undone the claim
        worker.claimer.wake()
        await jobs.ends(job)
        go_on.set()
        await eventually(lambda: not admission._looks and not worker.book.leases, "the first question is answered")
        assert worker.book.free["q"] == 3
    assert handlers.ran == [(job, 0)]
