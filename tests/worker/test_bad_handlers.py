"""A zoo of bad handlers in real worker processes: none of them harms the jobs beside it for good.

Exceptions are tested in test_worker_handlers.py, deadlines in test_deadlines.py, child processes in test_children.py;
here a whole worker process survives the handlers, or dies of them.
"""

import asyncio
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from support import zoo
from support.broken import without
from support.waiting import wait_until
from support.worker_process import WorkerProcess
from support.workers import Jobs, working
from tallybook import App, Context, JobInfo
from tallybook._worker.life.supervisor import WORN_OUT

NEIGHBOURS = 20
ENDS = {"completed", "dead", "cancelled"}


def state(db: Any, job: Any) -> JobInfo:
    return zoo.app.get(job).sync(db)


class Restarter:
    """A supervisor, which restarts a worker that died; all of them are killed at the end of the block."""

    def __init__(self, dsn: str, env: dict[str, str] | None = None, **options: Any) -> None:
        self._start = partial(WorkerProcess, dsn, "zoo", options, "support.zoo", **(env or {}))
        self.workers = [self._start()]

    def look(self) -> bool:
        """Start another if the last has ended."""
        if self.workers[-1].process.poll() is not None:
            self.workers.append(self._start())
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        print("\n---\n".join(worker.kill()[-3000:] for worker in self.workers))


def poisoned(dsn: str, db: Any, env: dict[str, str] | None = None) -> tuple[JobInfo, list[JobInfo], Restarter]:
    """Run one poison job among neighbours, all in one batch, until all have ended."""
    calls = [zoo.neighbour.job(n) for n in range(NEIGHBOURS)]
    calls.insert(NEIGHBOURS // 2, zoo.poison.job())
    put = zoo.app.enqueue_many_sync(db, calls)
    with Restarter(dsn, env, queues={"default": NEIGHBOURS + 1}) as restarter:
        wait_until(
            lambda: restarter.look() or {state(db, job).state for job in put} <= ENDS, "all have ended", seconds=90
        )
    poison = put.pop(NEIGHBOURS // 2)
    return state(db, poison), [state(db, job) for job in put], restarter


@pytest.mark.slow
def test_a_job_that_kills_its_worker_is_dead_and_its_neighbours_complete(dsn: str, db: Any) -> None:
    """F24 P8 S4-20: a job that calls os._exit runs alone the third time, and is dead as crashed; 20 others complete."""
    poison, neighbours, restarter = poisoned(dsn, db)
    assert (poison.state, poison.reason, poison.crashes, poison.failures) == ("dead", "crashed", 3, 0)
    assert Counter((job.state, job.failures) for job in neighbours) == {("completed", 0): NEIGHBOURS}
    died = [worker.process.returncode for worker in restarter.workers[:3]]
    assert died == [9, 9, 9]
    assert "runs alone now" in "".join(worker.said for worker in restarter.workers)


@pytest.mark.slow
def test_without_the_guard_its_neighbours_die_too(dsn: str, db: Any) -> None:
    """F24, negative control: if suspects do not run alone, and the database treats all alike, the neighbours die."""
    without(db, "_lost", "and (p_alone or", "and (true or")
    poison, neighbours, _ = poisoned(dsn, db, {"TALLYBOOK_TEST_ALONE": "no"})
    assert (poison.state, poison.reason) == ("dead", "crashed")
    assert Counter(job.state for job in neighbours)["dead"] == NEIGHBOURS


@pytest.mark.slow
@pytest.mark.parametrize("several", range(5))
def test_the_same_with_two_workers(dsn: str, db: Any, several: int) -> None:
    """F24: two poison jobs among 20, on two workers: both are dead as crashed, and all others complete, five times."""
    calls = [zoo.neighbour.job(n) for n in range(NEIGHBOURS)]
    calls[5:5], calls[15:15] = [zoo.poison.job()], [zoo.poison.job()]
    put = zoo.app.enqueue_many_sync(db, calls)
    with Restarter(dsn, queues={"default": 8}) as one, Restarter(dsn, queues={"default": 8}) as two:
        wait_until(
            lambda: one.look() or two.look() or {state(db, job).state for job in put} <= ENDS,
            "all have ended",
            seconds=250,
        )
    infos = [state(db, job) for job in put]
    assert Counter((job.task, job.state, job.reason) for job in infos) == {
        ("poison", "dead", "crashed"): 2,
        ("neighbour", "completed", None): NEIGHBOURS,
    }
    assert {job.failures for job in infos} == {0}


@pytest.mark.parametrize("by", ["batch", "order key"])
async def test_a_suspect_waits_until_it_is_alone(dsn: str, db: Any, by: str) -> None:
    """F24: a job with two crashes starts when nothing else runs, nothing starts beside it, and then all continue."""
    app = App("shop")
    beside: dict[int, int] = {}
    now: set[int] = set()

    @app.task
    async def look(ctx: Context) -> None:
        for other in now:
            beside[other] += 1
        beside[ctx.job_id] = len(now)
        now.add(ctx.job_id)
        await asyncio.sleep(0.2)
        now.discard(ctx.job_id)

    jobs = Jobs(app, db)
    key = "one after the other" if by == "order key" else None
    put = app.enqueue_many_sync(db, [look.with_(order_key=key).job() if n in (0, 1) else look.job() for n in range(6)])
    suspects = {put[0].id, put[1].id}
    db.execute("update tallybook.entry set crashes = 2 where job_id = any(%s)", (list(suspects),))
    async with working(app, dsn, queues={"default": 6}):
        infos = await jobs.ends(*put)
    assert {info.state for info in infos} == {"completed"}
    assert {beside[job] for job in suspects} == {0}
    assert any(beside[job.id] for job in put if job.id not in suspects)
    if by == "batch":
        assert {info.attempts for info in infos} == {1}


@pytest.mark.slow
async def test_a_suspect_that_cannot_be_alone_is_given_back(dsn: str, db: Any, caplog: Any) -> None:
    """F24: if another job keeps running, a suspect is given back with its counts unchanged, and claiming continues."""
    jobs = Jobs(zoo.app, db)
    long = zoo.stays.enqueue_sync(db)
    async with working(zoo.app, dsn, queues={"default": 3}, suspect_wait="100 ms") as worker:
        await jobs.becomes(long, "running")
        db.execute("begin")
        suspect = zoo.fine.enqueue_sync(db)
        db.execute("update tallybook.entry set crashes = 2 where job_id = %s", (suspect.id,))
        db.execute("commit")
        info = await jobs.becomes(suspect, "scheduled")
        (next_one,) = await jobs.ends(zoo.fine.enqueue_sync(db))
        assert jobs(long).state == "running" or next_one.state == "completed"
        assert worker.book.free["default"] >= 2
    assert (info.attempts, info.failures, info.crashes) == (0, 0, 2)
    assert "must run alone" in caplog.text


async def test_drain_runs_suspects_alone_too(dsn: str, db: Any) -> None:
    """F24: `drain` runs suspects, and reports them like all other jobs."""
    put = zoo.app.enqueue_many_sync(db, [zoo.fine.job(n) for n in range(12)])
    db.execute("update tallybook.entry set crashes = 2 where job_id % 2 = 0")
    report = await zoo.app.drain(dsn=dsn)
    assert report.completed == 12
    assert {state(db, job).attempts for job in put} == {1}
    assert {state(db, job).failures for job in put} == {0}


@pytest.mark.slow
def test_a_worker_lives_with_all_of_them(dsn: str, db: Any, tmp_path: Path) -> None:
    """F24 F25 F26 F27 F28: one worker, all bad handlers at once: each fails by itself; 200 good jobs complete."""

    def ended(db: Any, *jobs: Any, states: set[str] = ENDS, seconds: float = 30.0) -> Any:
        """Wait until all jobs are in one of these states; return them."""
        for job in jobs:
            wait_until(lambda job=job: state(db, job).state in states, f"job {job.id} is {states}", seconds=seconds)
        return [state(db, job) for job in jobs]

    bad = [
        zoo.sleeps.job(),
        zoo.swallows.job(),
        zoo.swallows_all.job(),
        zoo.turns.job(),
        zoo.spins.job(str(tmp_path / "spins")),
        zoo.hoards.job(str(tmp_path / "hoards")),
        zoo.raises.job("group"),
        zoo.raises.job("unprintable"),
        zoo.raises.job("SystemExit"),
        zoo.blocks.job(2.5),
    ]
    crashing = [zoo.dies.job(how) for how in ("segfault", "3", "killed")]
    with zoo.zoo(dsn, abort_timeout=0.3, queues={"default": 15}) as worker:
        put = zoo.app.enqueue_many_sync(db, [*bad, *crashing, *[zoo.fine.job(n) for n in range(200)]])
        good = ended(db, *put[13:])
        failed = ended(db, *put[:9], states={"retrying"})
        (blocked,) = ended(db, put[9])
        dead = ended(db, *put[10:13])
        assert worker.process.poll() is None
        worker.process.send_signal(signal.SIGTERM)
        assert worker.ends() == 0
    assert Counter(info.state for info in [*good, blocked]) == {"completed": 201}
    assert {info.failures for info in good} == {0} and {info.crashes for info in good} == {0}
    kinds = ["TimeoutError"] * 5 + ["MemoryError", "BaseExceptionGroup", "support.zoo.Unprintable", "SystemExit"]
    assert [info.errors[0]["type"] for info in failed] == kinds
    assert {(info.state, info.reason, info.failures) for info in dead} == {("dead", "crashed", 0)}
    assert "has blocked the event loop" in worker.said


@pytest.mark.slow
def test_a_worker_that_is_used_up_ends_by_itself(dsn: str, db: Any) -> None:
    """F25: a worker that has lost as many threads as it has slots ends with code 3 while they run; no job is lost."""
    put = zoo.app.enqueue_many_sync(db, [zoo.turns.job(), zoo.turns.job(), zoo.fine.job()])
    with zoo.zoo(dsn, abort_timeout=0.3, queues={"default": 2}) as worker:
        assert worker.ends() == WORN_OUT
        infos = [state(db, job) for job in put]
        assert "to be started again" in worker.said
    assert [info.state for info in infos[:2]] == ["retrying"] * 2
    assert infos[2].state in ("available", "completed")
    assert {info.crashes for info in infos} == {0}


def test_a_handler_that_swallows_everything_does_not_keep_the_process(dsn: str, db: Any) -> None:
    """F43: after the second SIGTERM the process ends, although an async handler ignores every cancel."""
    with zoo.zoo(dsn, abort_timeout=0.3, stop_timeout=90.0) as worker:
        job = zoo.swallows_for_ever.enqueue_sync(db)
        wait_until(lambda: state(db, job).state == "running", "it runs")
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in worker.said, "the first signal has arrived")
        worker.process.send_signal(signal.SIGTERM)
        assert worker.ends(40) == 0
        assert time.monotonic() - began < 80  # after the first signal alone it would wait for its stop_timeout
    info = state(db, job)
    assert (info.state, info.failures, info.crashes) == ("available", 0, 0)
