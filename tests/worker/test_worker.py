"""How attempts end, what follows, and when the worker claims: a worker in this process, a real PostgreSQL."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.broken import without
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Cancel, Constant, Context, Dead, Snooze
from tallybook._worker.jobs import Book, Lease


async def test_a_failure_is_retried_after_its_backoff(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-24: a failed attempt is retried after its backoff, not before, and may complete then; failures are counted."""
    starts: list[float] = []
    loop = asyncio.get_running_loop()

    @app.task(retry=Constant(timedelta(seconds=0.3)))
    async def flaky() -> None:
        starts.append(loop.time())
        if len(starts) < 3:
            raise ValueError(f"no luck {len(starts)}")

    job = flaky.enqueue_sync(db)
    async with working(app, dsn, **SLEEPY):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts, ended.failures) == ("completed", 3, 2)
    assert [round(later - earlier, 1) >= 0.3 for earlier, later in itertools.pairwise(starts)] == [True] * 2


async def test_out_of_attempts_is_dead_with_its_history(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-12 S4-13 S1-24: after max_attempts failures a job is dead; every error is kept with its time and attempt."""

    @app.task(retry=Constant(timedelta(0)), max_attempts=3)
    async def broken(ctx: Context) -> None:
        raise ValueError(f"no luck {ctx.attempt}, {ctx.failures} before")

    job = broken.enqueue_sync(db)
    before = datetime.now(UTC)
    async with working(app, dsn, **SLEEPY):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.reason, ended.attempts, ended.failures) == ("dead", "failed", 3, 3)
    assert ended.last_error == "no luck 3, 2 before"
    assert ended.errors is not None
    assert [(error["attempt"], error["message"], error["type"]) for error in ended.errors] == [
        (n, f"no luck {n}, {n - 1} before", "ValueError") for n in (1, 2, 3)
    ]
    instants = [datetime.fromisoformat(error["at"]) for error in ended.errors]
    assert before <= instants[0] <= instants[1] <= instants[2] <= datetime.now(UTC)
    assert "in broken" in ended.errors[2]["traceback"]


async def test_max_attempts_of_the_job_beats_that_of_the_task(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-04: the task's default holds unless the enqueue sets another value."""

    @app.task(retry=Constant(timedelta(0)), max_attempts=2)
    async def broken() -> None:
        raise ValueError

    usual, patient = broken.enqueue_sync(db), broken.with_(max_attempts=4).enqueue_sync(db)
    async with working(app, dsn, **SLEEPY):
        assert [job.failures for job in await jobs.ends(usual, patient)] == [2, 4]


@pytest.mark.parametrize("how", ["returned", "raised"])
async def test_outcomes_are_returned_or_raised(app: App, dsn: str, db: Any, jobs: Jobs, how: str) -> None:
    """Async and plain handlers end an attempt by Snooze, Cancel or Dead; Snooze and Cancel count no failure."""
    hour = timedelta(hours=1)
    outcomes: dict[str, Callable[[], Exception]] = {
        "snooze": lambda: Snooze(hour),
        "until": lambda: Snooze(until=datetime.now(UTC) + hour),
        "cancel": lambda: Cancel("the order is gone"),
        "dead": lambda: Dead("account closed"),
    }

    def outcome(kind: str) -> Any:
        found = outcomes[kind]()
        if how == "raised":
            raise found
        return found

    @app.task
    async def on_loop(kind: str) -> Any:
        return outcome(kind)

    @app.task
    def on_thread(kind: str) -> Any:
        return outcome(kind)

    put = {(task.name, kind): task.enqueue_sync(db, kind) for task in (on_loop, on_thread) for kind in outcomes}
    wanted = {"snooze": "scheduled", "until": "scheduled", "cancel": "cancelled", "dead": "dead"}
    async with working(app, dsn):
        found = {key: await jobs.becomes(job, wanted[key[1]]) for key, job in put.items()}
    for (_, kind), info in found.items():
        assert (info.attempts, info.failures) == (1, 0) if kind != "dead" else info.attempts == 1
        if kind in ("snooze", "until"):
            assert info.run_at is not None
            assert abs(info.run_at - datetime.now(UTC) - hour) < timedelta(seconds=30)
        elif kind == "cancel":
            assert info.reason == "the order is gone"
        else:
            assert info.last_error == "account closed"


async def test_a_snooze_counts_no_failure(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A job may snooze more often than it may fail."""
    seen: list[tuple[int, int]] = []

    @app.task(max_attempts=1)
    async def waits(ctx: Context) -> Any:
        seen.append((ctx.attempt, ctx.failures))
        return Snooze(timedelta(milliseconds=1)) if ctx.attempt < 4 else None

    job = waits.enqueue_sync(db)
    async with working(app, dsn, **SLEEPY):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts, ended.failures) == ("completed", 4, 0)
    assert seen == [(1, 0), (2, 0), (3, 0), (4, 0)]


async def test_args_that_do_not_fit_are_dead_at_once(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Args from SQL that do not fit the signature are dead at once: they cannot fit later."""

    @app.task
    async def strict(user_id: int) -> None:
        pass

    (job,) = db.execute("""select tallybook.enqueue('default', 'strict', '{"user": 42}')""").fetchone()
    async with working(app, dsn):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts) == ("dead", 1)
    assert ended.last_error is not None
    assert "user_id" in ended.last_error


async def test_the_loop_outlives_an_error_of_its_own(dsn: str, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S5-09: while claims fail for lack of memory, the worker logs it and retries; later it works, not restarted."""
    app = App("shop")

    @app.task
    async def known() -> None:
        """Do nothing."""

    jobs = Jobs(app, db)
    async with working(app, dsn):
        await jobs.ends(known.enqueue_sync(db))
        (claim,) = db.execute("select pg_get_functiondef('tallybook._take'::regproc)").fetchone()
        without(db, "_take", "\nbegin\n", "\nbegin\n  raise exception 'out of order' using errcode = '53200';\n")
        job = known.enqueue_sync(db)
        await eventually(lambda: "out of order" in caplog.text, "the error is logged")
        assert jobs(job).state == "available"
        db.execute(claim)
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts) == ("completed", 1)


@pytest.mark.parametrize("quiet", [60.0, 0.0], ids=["", "the minute is over"])
async def test_an_unknown_task_is_warned_of_once_a_minute(
    app: App,
    dsn: str,
    db: Any,
    note: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    quiet: float,
) -> None:
    """S5-08: the log has one warning per unknown task and minute, which names the task."""
    monkeypatch.setattr("tallybook._worker.run.runner._QUIET", quiet)
    caplog.set_level(logging.INFO, "tallybook.worker")
    db.execute(
        "select tallybook.enqueue('default', t, '{}') from unnest('{todo,later}'::text[]) t, generate_series(1, 5)"
    )
    async with working(app, dsn):
        aside = "select count(*) from tallybook.job where unserved"
        await eventually(lambda: db.execute(aside).fetchone() == (10,), "all are put aside")
    found = [record for record in caplog.records if getattr(record, "event", None) == "unknown_task"]
    each = 1 if quiet else 5
    assert Counter((record.levelname, record.__dict__["task_name"]) for record in found) == {
        ("WARNING", "todo"): each,
        ("WARNING", "later"): each,
    }
    assert found[0].getMessage().endswith(": no task 'todo' here, set aside for a worker that knows it")


async def test_an_old_and_a_new_worker_on_one_queue(dsn: str, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S5-08 S4-10: a task that the old worker does not know is logged and set aside for the new one, without a failure.

    Without a new worker the job is visible as unserved, and the old worker runs what it knows. Once a worker knows the
    task, its jobs run at once, beside those that both know.
    """
    caplog.set_level(logging.INFO, "tallybook")
    old, new = App("old"), App("new")
    ran: list[tuple[str, int]] = []

    @old.task(name="known")
    async def known_by_old(n: int) -> None:
        ran.append(("old", n))

    @new.task(name="known")
    async def known_by_new(n: int) -> None:
        ran.append(("new", n))

    @new.task
    async def fresh(n: int) -> None:
        ran.append(("new", n))

    jobs = Jobs(new, db)
    async with working(old, dsn, **SLEEPY):
        aside = [fresh.enqueue_sync(db, n) for n in range(5)]
        for job in aside:
            await eventually(lambda job=job: jobs(job).unserved, "is put aside")  # type: ignore[misc]
        info = jobs(aside[0])
        assert (info.state, info.attempts, info.failures, info.crashes) == ("available", 0, 0, 0)
        assert "no task 'fresh' here, set aside for a worker that knows it" in caplog.text
        (served,) = await jobs.ends(known_by_new.enqueue_sync(db, 100))
        assert ran == [("old", 100)]
        async with working(new, dsn, **SLEEPY):
            ended = await jobs.ends(*aside)
            assert {(job.state, job.attempts, job.failures, job.unserved) for job in ended} == {
                ("completed", 1, 0, False)
            }
            later = [fresh.enqueue_sync(db, n) for n in range(10, 40)]
            later += [known_by_new.enqueue_sync(db, n) for n in range(110, 140)]
            ended = await jobs.ends(*later)
            assert {(job.state, job.failures) for job in ended} == {("completed", 0)}
    assert sorted(n for _, n in ran) == [*range(5), *range(10, 40), 100, *range(110, 140)]
    assert served.failures == 0


async def test_slots_are_respected(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S3-40: a queue runs as many jobs at once as it has slots, claimed in one batch, and never more."""
    running, most = 0, 0
    gate = asyncio.Event()

    @app.task
    async def hold() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    @app.task(queue="other")
    async def other() -> None:
        await gate.wait()

    put = app.enqueue_many_sync(db, [hold.job() for _ in range(20)] + [other.job() for _ in range(5)])
    async with working(app, dsn, queues={"default": 3, "other": 2}) as worker:
        await eventually(lambda: running == 3 and len(worker.book.running) == 5, "all slots are taken")
        assert sum(jobs(job).state == "running" for job in put) == 5
        assert db.execute("select array_agg(jobs order by jobs) from tallybook.claim").fetchone() == ([2, 3],)
        gate.set()
        await jobs.ends(*put)
        await eventually(lambda: worker.book.free == {"default": 3, "other": 2}, "each slot is free again")
    assert most == 3


async def test_a_plain_handler_takes_a_slot_for_as_long_as_it_runs(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Plain handlers run side by side, as many as there are slots."""
    import threading

    together = threading.Barrier(4)

    @app.task
    def meets() -> None:
        together.wait(10)

    put = app.enqueue_many_sync(db, [meets.job() for _ in range(8)])
    async with working(app, dsn, queues={"default": 4}):
        assert {job.state for job in await jobs.ends(*put)} == {"completed"}


async def test_lower_priority_numbers_run_first(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-08: lower numbers run first; within a priority, jobs run in the order of their enqueue."""
    ran: list[int] = []

    @app.task
    async def note(n: int) -> None:
        ran.append(n)

    put = [note.with_(priority=priority).enqueue_sync(db, n) for n, priority in enumerate([5, 1, 2, 1, 0, 5])]
    async with working(app, dsn, queues={"default": 1}):
        await jobs.ends(*put)
    assert ran == [4, 1, 3, 2, 0, 5]


async def test_delayed_and_immediate_jobs_go_through_one_queue(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-01 S2-09: one worker runs delayed and immediate jobs; a delayed one starts when due, without polling."""
    ran: list[str] = []

    @app.task
    async def note(what: str) -> None:
        ran.append(what)

    async with working(app, dsn, **SLEEPY):
        delayed = note.with_(delay=timedelta(seconds=0.7)).enqueue_sync(db, "delayed")
        now = note.enqueue_sync(db, "now")
        await jobs.ends(now)
        (ended,) = await jobs.ends(delayed)
    assert ran == ["now", "delayed"]
    assert ended.started_at is not None
    assert ended.run_at is not None
    assert timedelta(0) <= ended.started_at - ended.run_at < timedelta(seconds=1)


async def test_a_handlers_follow_up_runs_next(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-12: a job that a handler enqueues runs after it."""
    ran: list[int] = []

    @app.task
    async def step(left: int) -> None:
        ran.append(left)
        if left:
            await step.enqueue(app, left - 1)

    app.dsn = dsn
    async with working(app, dsn, **SLEEPY):
        step.enqueue_sync(db, 5)
        await eventually(lambda: ran == [5, 4, 3, 2, 1, 0], "all steps ran")


def test_the_watermark_hides_no_claim_after_the_numbers_were_set_back() -> None:
    """F5: a server crash can set the claims' numbers back; no open claim is below the watermark sent afterwards."""
    book = Book({"default": 10})
    before = Lease("a", 1000, "default")
    book.opened(before, 1)
    book.forget()  # the connection was lost
    assert book.open_from == 1000  # still to be ended
    book.opened(Lease("b", 968, "default"), 1)
    assert book.open_from == 968
    book.ended(before)
    book.forget()
    book.leases.clear()
    assert book.open_from == 0  # the next number is unknown


def test_two_claims_with_one_number_are_told_apart() -> None:
    """F5 F13: after numbers were set back, the end of a forgotten claim does not close the claim with its number."""
    book = Book({"default": 10})
    forgotten, open_one = Lease("a", 7, "default"), Lease("b", 7, "default")
    book.opened(forgotten, 1)
    book.opened(open_one, 1)
    book.ended(forgotten)
    assert book.open_from == 7
    book.ended(open_one)
    assert book.open_from == 8


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
