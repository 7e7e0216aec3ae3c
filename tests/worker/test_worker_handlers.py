"""Handlers: each runs as if it had its own asyncio task and context, and none can harm the worker."""

import asyncio
import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import anyio
import psycopg
import pytest

from support.workers import Jobs, eventually, working
from support.zoo import Unprintable
from tallybook import App, Cancel, Constant, Context, Dead, Snooze
from tallybook._worker.finish.finisher import Finisher, How
from tallybook._worker.run import ending

mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="clean")


async def test_async_and_plain_handlers_run(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """An async handler runs on the loop, a plain one on a thread; both get their args by name, and a Context."""
    seen: list[Any] = []

    @app.task
    async def on_loop(ctx: Context, a: int, *, b: str = "x") -> None:
        seen.append((ctx.task, ctx.job_id, ctx.attempt, ctx.args, a, b, threading.current_thread() is main))

    @app.task
    def on_thread(ctx: Context, a: int, *, b: str = "x") -> None:
        seen.append((ctx.task, ctx.job_id, ctx.attempt, ctx.args, a, b, threading.current_thread() is main))

    main = threading.current_thread()
    first = on_loop.enqueue_sync(db, 1, b="y")
    second = on_thread.enqueue_sync(db, 2)
    async with working(app, dsn):
        await jobs.ends(first, second)
    assert sorted(seen) == [
        ("on_loop", first.id, 1, {"a": 1, "b": "y"}, 1, "y", True),
        ("on_thread", second.id, 1, {"a": 2}, 2, "x", False),
    ]


async def test_a_plain_handler_without_a_thread_does_not_run_later(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can be started, the attempt fails and its handler never runs; the slot has a thread afterwards."""
    seen: list[int] = []
    start = threading.Thread.start

    @app.task(retry=Constant(timedelta(hours=1)))
    def plain(n: int) -> None:
        seen.append(n)

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("tallybook-job"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with working(app, dsn, queues={"default": 1}):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            await jobs.becomes(plain.enqueue_sync(db, 1), "retrying")
        await jobs.becomes(plain.enqueue_sync(db, 2), "completed", seconds=10)
    assert seen == [2]


async def test_lifespans_open_once_and_close_at_the_stop(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Every handler finds what lifespans put into ctx.state; they close in reverse when the worker has stopped."""
    events: list[Any] = []

    @app.lifespan
    async def outer(ctx: Context) -> AsyncIterator[None]:
        ctx.state.word = "hello"
        yield
        events.append("outer closed")

    @app.lifespan
    async def inner(ctx: Context) -> AsyncIterator[None]:
        ctx.state.words = [ctx.state.word]
        yield
        events.append("inner closed")

    @app.task
    async def say(ctx: Context) -> None:
        events.append(ctx.state.words)

    async with working(app, dsn):
        await jobs.ends(say.enqueue_sync(db), say.enqueue_sync(db))
    assert events == [["hello"], ["hello"], "inner closed", "outer closed"]


async def test_a_plain_around_job_runs_in_the_handlers_thread(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A plain generator hook runs around plain handlers, also atomic ones, in their thread, and around no async one."""
    events: list[Any] = []

    @app.around_job
    def around(ctx: Context) -> Iterator[None]:
        events.append(("before", ctx.task, threading.get_ident()))
        try:
            yield
        except ValueError as error:
            events.append(("error", str(error)))
            raise

    @app.task
    async def on_loop() -> None:
        events.append("loop")

    @app.task(atomic=True)
    def in_transaction(tx: psycopg.Connection) -> None:
        events.append(("in", threading.get_ident()))

    @app.task(retry=Constant(timedelta(hours=1)))
    def on_thread() -> None:
        events.append(("in", threading.get_ident()))
        raise ValueError("no luck")

    async with working(app, dsn):
        await jobs.ends(on_loop.enqueue_sync(db))
        await jobs.ends(in_transaction.enqueue_sync(db))
        await jobs.becomes(on_thread.enqueue_sync(db), "retrying")
    (loop, first, inside, second, again, error) = events
    assert loop == "loop"
    assert first == ("before", "in_transaction", inside[1])
    assert second == ("before", "on_thread", again[1])
    assert again[1] != threading.get_ident()
    assert error == ("error", "no luck")


async def test_around_job_wraps_each_job_and_sees_its_error(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Hooks nest as declared, run in the job's own context, also for plain handlers, and see a handler's errors."""
    events: list[Any] = []

    @app.around_job
    async def outer(ctx: Context) -> AsyncIterator[None]:
        mark.set(f"job {ctx.args['n']}")
        try:
            yield
        except ValueError as error:
            events.append(("outer", str(error)))
            raise

    @app.around_job
    async def inner(ctx: Context) -> AsyncIterator[None]:
        yield
        events.append(("inner", mark.get()))

    @app.task(retry=Constant(timedelta(hours=1)))
    async def on_loop(n: int) -> None:
        events.append(("handler", mark.get()))
        if n == 2:
            raise ValueError("no luck")

    @app.task
    def on_thread(n: int) -> None:
        events.append(("thread", mark.get()))

    async with working(app, dsn):
        await jobs.ends(on_loop.enqueue_sync(db, 1))
        await jobs.becomes(on_loop.enqueue_sync(db, 2), "retrying")
        await jobs.ends(on_thread.enqueue_sync(db, 3))
    assert events == [
        ("handler", "job 1"),
        ("inner", "job 1"),
        ("handler", "job 2"),
        ("outer", "no luck"),
        ("thread", "job 3"),
        ("inner", "job 3"),
    ]


async def test_context_variables_of_a_job_end_with_it(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """No job sees what another sets, whether they waited or not, on loop and threads; children inherit it."""
    seen: list[str] = []

    @app.task
    async def leave(n: int, wait: bool) -> None:
        seen.append(mark.get())
        mark.set(f"left by {n}")
        if wait:
            await asyncio.sleep(0)
            assert mark.get() == f"left by {n}"
            assert await asyncio.create_task(_look()) == f"left by {n}"

    @app.task
    def leave_in_thread(n: int) -> None:
        seen.append(mark.get())
        mark.set(f"left by {n}")

    async def _look() -> str:
        return mark.get()

    many = [leave.job(n, n % 3 == 1) for n in range(30)] + [leave_in_thread.job(n) for n in range(20)]
    put = app.enqueue_many_sync(db, many)
    async with working(app, dsn):
        ended = await jobs.ends(*put)
    assert {job.state for job in ended} == {"completed"}
    assert seen == ["clean"] * 50


async def test_timeouts_and_groups_work_inside_handlers(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """asyncio.timeout, TaskGroup, and anyio's scopes and groups work, between jobs that never wait."""
    seen: list[str] = []

    @app.task
    async def quick() -> None:
        pass

    @app.task
    async def times_out(after_waiting: bool) -> None:
        if after_waiting:
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(0.02):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("asyncio.timeout")
        with anyio.move_on_after(0.02) as scope:
            await anyio.sleep_forever()
        seen.append(f"anyio {scope.cancelled_caught}")

    @app.task
    async def groups() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.01))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                group.create_task(_fails())
        except* ValueError:
            seen.append("TaskGroup")
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.cancel_scope.cancel()
        seen.append("anyio group")

    async def _fails() -> None:
        raise ValueError

    calls = [
        quick.job(),
        times_out.job(False),
        quick.job(),
        times_out.job(True),
        quick.job(),
        groups.job(),
        quick.job(),
    ]
    put = app.enqueue_many_sync(db, calls)
    async with working(app, dsn, queues={"default": 20}):
        ended = await jobs.ends(*put)
    assert [job.state for job in ended] == ["completed"] * 7
    assert sorted(seen) == ["TaskGroup", "anyio True", "anyio True", "anyio group", *["asyncio.timeout"] * 2]


async def test_one_that_waits_holds_up_no_other(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Handlers that never wait complete while others wait before, between and after them; each ends at its gate."""
    gates = {n: asyncio.Event() for n in range(0, 30, 3)}

    @app.task
    async def maybe(n: int) -> None:
        if n in gates:
            await gates[n].wait()

    put = app.enqueue_many_sync(db, [maybe.job(n) for n in range(30)])
    async with working(app, dsn, queues={"default": 40}) as worker:
        await jobs.ends(*[job for n, job in enumerate(put) if n not in gates])
        assert sorted(worker.book.running) == [put[n].id for n in gates]
        for n in reversed(gates):
            gates[n].set()
            await jobs.ends(put[n])


@pytest.mark.parametrize("where", ["at once", "after waiting", "thread"])
async def test_whatever_a_handler_raises_fails_its_job_only(
    app: App, dsn: str, db: Any, jobs: Jobs, where: str
) -> None:
    """S5-09: any exception ends one attempt as failed; the worker, and the jobs beside it, continue."""
    errors = {
        "ValueError": lambda: ValueError("no luck"),
        "CancelledError": lambda: asyncio.CancelledError("of its own"),
        "KeyboardInterrupt": KeyboardInterrupt,
        "SystemExit": lambda: SystemExit(3),
        "GeneratorExit": GeneratorExit,
        "StopIteration": StopIteration,
        "StopAsyncIteration": StopAsyncIteration,
        "unprintable": Unprintable,
        "NUL": lambda: ValueError("a\0b \ud800"),
        "group": lambda: ExceptionGroup("many", [ValueError("one"), Snooze(timedelta(hours=1))]),
        "TimeoutError": TimeoutError,
    }
    retry = Constant(timedelta(hours=1))

    @app.task(retry=retry)
    async def on_loop(kind: str, waits: bool) -> None:
        if waits:
            await asyncio.sleep(0)
        raise errors[kind]()

    @app.task(retry=retry)
    def on_thread(kind: str) -> None:
        raise errors[kind]()

    @app.task
    async def fine() -> None:
        await asyncio.sleep(0)

    async with working(app, dsn) as worker:
        for kind in errors:
            bad = on_thread.job(kind) if where == "thread" else on_loop.job(kind, where == "after waiting")
            put = app.enqueue_many_sync(db, [fine.job(), bad, fine.job()])
            await jobs.ends(put[0], put[2], fine.enqueue_sync(db))
            failed = await jobs.becomes(put[1], "retrying")
            assert worker.book.free == {"default": 10}, kind
            assert failed.failures == 1, kind
            assert failed.errors is not None and failed.errors[0]["type"], kind


async def test_what_reading_args_or_a_result_raises_fails_its_job_only(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Any exception of user code that runs while the args are read or the result is encoded fails the attempt."""
    kinds = {kind.__name__: kind for kind in (GeneratorExit, SystemExit, asyncio.CancelledError)}
    retry = Constant(timedelta(hours=1))
    reading = False

    @dataclass
    class Odd:
        """A result that raises an exception while it is encoded."""

        kind: type[BaseException]

        def __getattribute__(self, name: str) -> Any:
            if name == "kind":
                raise object.__getattribute__(self, name)
            return object.__getattribute__(self, name)

    @dataclass
    class Picky:
        """An arg that raises an exception while it is read, but not where it is enqueued."""

        kind: str

        def __post_init__(self) -> None:
            if reading:
                raise kinds[self.kind]

    @app.task(retry=retry)
    async def takes(arg: Picky) -> None:
        pass

    @app.task(retry=retry)
    async def returns(kind: str) -> Odd:
        return Odd(kinds[kind])

    put = [job for kind in kinds for job in (takes.enqueue_sync(db, Picky(kind)), returns.enqueue_sync(db, kind))]
    reading = True
    async with working(app, dsn) as worker:
        for job in put:
            assert (await jobs.becomes(job, "retrying", "completed")).failures == 1
        await eventually(lambda: worker.book.free == {"default": 10}, "each slot is free again")


async def test_no_outcome_can_stop_the_worker(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S5-09: an outcome that cannot be stored as it is still ends its attempt, and the worker continues."""
    outcomes = {
        "Snooze for ever": lambda: Snooze(timedelta.max),
        "Snooze until the end": lambda: Snooze(until=datetime.max.replace(tzinfo=UTC)),
        "Cancel with NUL": lambda: Cancel("a\0b"),
        "Cancel with a surrogate": lambda: Cancel("\ud800"),
        "Dead with NUL": lambda: Dead("a\0b"),
        "Dead with a surrogate": lambda: Dead("\ud800"),
        "Dead, in megabytes": lambda: Dead("x" * 5_000_000),
        "Cancel with a number": lambda: Cancel(42),  # type: ignore[arg-type]
    }

    @app.task
    async def odd(kind: str) -> Any:
        return outcomes[kind]()

    @app.task
    async def fine() -> None:
        pass

    ids = [odd.enqueue_sync(db, kind) for kind in outcomes]
    async with working(app, dsn):
        for job in ids:
            await jobs.becomes(job, "cancelled", "dead", "scheduled", "retrying")
        await jobs.ends(fine.enqueue_sync(db))


async def test_an_end_that_the_server_refuses_becomes_a_failure(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5-09: if the statement of an end fails, the attempt fails with a note of that."""

    @app.task
    async def later() -> Snooze:
        return Snooze(timedelta(0))

    refused = SimpleNamespace(worker="select 1 / (%s::text || %s::text || %s::text)::int")
    monkeypatch.setattr(ending, "snooze", lambda delay: How("snooze", refused))  # type: ignore[arg-type]
    async with working(app, dsn):
        job = later.enqueue_sync(db)
        await jobs.becomes(job, "retrying")
    (said,) = db.execute("select last_error from tallybook.job where id = %s", [job.id]).fetchone()
    assert said == "its end (snooze) could not be stored"


@pytest.mark.parametrize("delay", [RuntimeError("no idea"), 5, timedelta.max, timedelta(days=-1)], ids=repr)
async def test_no_retry_policy_can_stop_the_worker(app: App, dsn: str, db: Any, jobs: Jobs, delay: Any) -> None:
    """S5-09: a retry policy that raises, or returns nonsense, fails its own job only."""

    class Policy:
        def delay(self, failures: int) -> Any:
            if isinstance(delay, Exception):
                raise delay
            return delay

    @app.task(retry=Policy(), max_attempts=2)
    async def broken() -> None:
        raise ValueError("no luck")

    @app.task
    async def fine() -> None:
        pass

    job = broken.enqueue_sync(db)
    async with working(app, dsn) as worker:
        await jobs.becomes(job, "retrying", "dead")
        await jobs.ends(fine.enqueue_sync(db))
        await eventually(lambda: worker.book.free == {"default": 10}, "all slots are free")


async def test_a_plain_function_that_returns_a_coroutine_is_awaited(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """An async function behind a plain decorator is awaited to its end, not dropped as completed."""
    ran: list[str] = []

    async def inside() -> None:
        await asyncio.sleep(0)
        ran.append("inside")

    @app.task
    def outside() -> Any:
        return inside()

    job = outside.enqueue_sync(db)
    async with working(app, dsn):
        (ended,) = await jobs.ends(job)
    assert (ended.state, ran) == ("completed", ["inside"])


async def test_the_asyncio_task_that_a_job_cancels_is_its_own(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A handler that cancels its own asyncio task, and returns, cancels no later job."""

    @app.task
    async def cancels_itself() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.cancel()

    @app.task
    async def waits() -> None:
        await asyncio.sleep(0.01)

    put = app.enqueue_many_sync(db, [cancels_itself.job(), waits.job(), cancels_itself.job(), waits.job()])
    async with working(app, dsn):
        await eventually(lambda: all(jobs(job).state not in ("available", "running") for job in put), "all have ended")
    assert [jobs(job).state for job in put] == ["completed"] * 4


async def test_every_log_line_of_a_job_names_it(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """ctx.log marks its lines with the job, in the text and as an attribute."""
    caplog.set_level(logging.INFO, logger="tallybook.job")

    @app.task
    async def talks(ctx: Context) -> None:
        ctx.log.info("page %s", 4)

    job = talks.enqueue_sync(db)
    async with working(app, dsn):
        await jobs.ends(job)
    (line,) = [record for record in caplog.records if record.name == "tallybook.job"]
    assert line.getMessage() == f"[talks {job.id}] page 4"
    assert line.job == job.id  # type: ignore[attr-defined]


async def test_ends_are_told_in_one_statement(app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F8 P6: each flush is one statement, so a frozen worker cannot hold the outcomes locked between two."""
    flushes: list[int] = []
    flush = Finisher._flush_ends

    async def watched(self: Finisher, conn: Any, ends: list[Any]) -> None:
        executes = 0
        execute = conn.execute

        async def counted(*args: Any, **options: Any) -> Any:
            nonlocal executes
            executes += 1
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            return await execute(*args, **options)

        monkeypatch.setattr(conn, "execute", counted)
        await flush(self, conn, ends)
        monkeypatch.setattr(conn, "execute", execute)
        assert executes == 1
        flushes.append(len(ends))

    monkeypatch.setattr(Finisher, "_flush_ends", watched)

    @app.task(retry=Constant(timedelta(hours=1)))
    async def breaks() -> None:
        raise ValueError

    for _ in range(10):
        breaks.enqueue_sync(db)
    async with working(app, dsn):
        await eventually(
            lambda: db.execute("select count(*) from tallybook.scheduled").fetchone() == (10,), "ten in backoff"
        )
    assert sum(flushes) == 10 and max(flushes) > 1


async def test_a_failure_leaves_nothing_of_its_handler(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """A worker keeps no exception of a handler that failed, since that would hold the locals of its frames."""
    frames: list[weakref.ref[Any]] = []

    class Local:
        pass

    @app.task(max_attempts=1)
    async def bad() -> None:
        local = Local()
        frames.append(weakref.ref(local))
        raise ValueError

    @app.task
    async def fine() -> None:
        await asyncio.sleep(0)

    async with working(app, dsn):
        (info,) = await jobs.ends(bad.enqueue_sync(db))
        await jobs.ends(fine.enqueue_sync(db))  # the last flush is kept until the next one
        gc.collect()
        assert [info.state, *(frame() for frame in frames)] == ["dead", None]
