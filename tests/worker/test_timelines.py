"""A worker whose server was replaced by another one, which may lack the last commits.

A test replaces the function that returns the timeline; `make chaos NEMESES=failover` promotes a real standby.
"""

import threading
from datetime import timedelta
from typing import Any

import pytest

from support.waiting import wait_until
from support.workers import QUICK, Jobs, eventually, working
from tallybook import App, Context
from tallybook._worker.life.heartbeat import _BEAT, Heartbeat

pytestmark = pytest.mark.servers

TIMELINE = (
    "create or replace function tallybook._timeline() returns text language sql volatile as $$ select '{}'::text $$"
)
# No rescue here: another worker of the process would take the jobs that this one gives up.
ALONE = {"heartbeat": timedelta(seconds=0.2), "lease": timedelta(seconds=60), "rescue_look": timedelta(seconds=60)}


def lose_the_end_of(db: Any, job: Any) -> None:
    """Delete the outcome and keep the claim, as on a standby."""
    lost = db.execute(
        "delete from tallybook.outcome o using tallybook.entry e where e.job_id = %s"
        " and o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq",
        (job.id,),
    )
    assert lost.rowcount == 1


async def run_and_lose(app: App, db: Any, jobs: Jobs, runs: list[int]) -> Any:
    """Return a job that its worker has completed and the database has lost; the watermark is past it."""

    @app.task
    async def note(ctx: Context) -> None:
        runs.append(ctx.attempt)

    job = note.enqueue_sync(db)
    await jobs.ends(job)
    later = note.enqueue_sync(db)
    await jobs.ends(later)
    passed = (
        "select count(*) from tallybook.worker w join tallybook.claim c on c.worker_id = w.id and c.id < w.open_from"
    )
    await eventually(lambda: db.execute(passed).fetchone()[0] >= 1, "the watermark is past the first claim")
    lose_the_end_of(db, job)
    assert jobs(job).state == "running"
    return job


async def test_a_lost_end_is_found_after_a_failover(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F13 P3 P10: if a job's end was lost with the old primary, its worker registers anew and the job runs again."""
    jobs, runs, beating, beat = Jobs(app, db), list[int](), threading.Lock(), Heartbeat._beat

    def one_at_a_time(self: Heartbeat) -> None:
        with beating:
            beat(self)

    monkeypatch.setattr(Heartbeat, "_beat", one_at_a_time)
    async with working(app, dsn, **ALONE):
        job = await run_and_lose(app, db, jobs, runs)
        # The standby's watermark is older than the lost end: no heartbeat may advance it before the failover.
        with beating:
            db.execute("update tallybook.worker set open_from = 0")
            db.execute(TIMELINE.format("00000002"))
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts) == ("completed", 2)
    assert runs == [1, 1, 2]


@pytest.mark.slow
async def test_control_without_the_timeline_a_lost_end_is_never_found(app: App, dsn: str, db: Any) -> None:
    """F13: negative control: a worker that does not notice reports its older claims ended, and the job stays lost."""
    jobs, runs = Jobs(app, db), list[int]()
    async with working(app, dsn, **{**ALONE, "lease": QUICK["lease"], "rescue_look": QUICK["rescue_look"]}):
        job = await run_and_lose(app, db, jobs, runs)
        before = db.execute("update tallybook.worker set open_from = 0 returning seen_at").fetchone()[0]
        beats = "select count(*) from tallybook.worker where seen_at > %s + interval '3 s' and open_from > 1"
        await eventually(lambda: db.execute(beats, (before,)).fetchone()[0] == 1, "it has beaten on")
        assert jobs(job).state == "running"
    # Even after the worker's stop: nobody looks at claims below the watermark.
    assert jobs(job).state == "running"


async def test_what_runs_at_a_failover_is_fenced(app: App, dsn: str, db: Any) -> None:
    """F13 P5: a handler that runs during a failover is cancelled, and its job runs again under a new lease."""
    living = "select id from tallybook.worker where ended_at is null order by id"
    jobs, runs = Jobs(app, db), list[int]()

    @app.task
    async def hold(ctx: Context) -> None:
        runs.append(ctx.attempt)
        while ctx.attempt == 1:
            await eventually(lambda: False, "cancelled", seconds=60)

    job = hold.enqueue_sync(db)
    async with working(app, dsn, **ALONE):
        await eventually(lambda: runs, "the handler has begun")
        db.execute(TIMELINE.format("00000002"))
        (ended,) = await jobs.ends(job)
        assert (ended.state, ended.attempts, runs) == ("completed", 2, [1, 2])
        await eventually(lambda: len(db.execute(living).fetchall()) == 1, "its old self is off record")


def test_each_timeline_has_worker_numbers_of_its_own(db: Any) -> None:
    """F13: worker numbers from before the failover, even forgotten ones, are not reused after it."""
    start = "select tallybook.worker_start('w', '{default}')"
    first = db.execute(start).fetchone()[0]
    db.execute(TIMELINE.format("0000000B"))
    numbers = [db.execute(start).fetchone()[0] for _ in range(3)]
    assert first < 1_000_000
    assert numbers == [10_000_001, 10_000_002, 10_000_003]


def test_a_beat_on_another_timeline_changes_nothing(db: Any) -> None:
    """F13: the timeline check and the heartbeat are one statement: if refused, it leaves watermark and time alone."""
    worker = db.execute("select tallybook.worker_start('w', '{default}')").fetchone()[0]
    here = db.execute("select tallybook._timeline()").fetchone()[0]
    read = "select seen_at, open_from from tallybook.worker where id = %s"
    before = db.execute(read, (worker,)).fetchone()
    with pytest.raises(Exception, match="timeline") as refused:
        db.execute(_BEAT, ("0000FFFF", worker, 1, [], None, None))
    assert refused.value.sqlstate == "TB006"  # type: ignore[attr-defined]
    assert db.execute(read, (worker,)).fetchone() == before
    db.execute(_BEAT, (here, worker, 1, [], None, None))
    wait_until(lambda: db.execute(read, (worker,)).fetchone() != before, "on its own timeline it beats")
