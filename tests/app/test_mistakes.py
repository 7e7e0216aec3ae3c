"""Mistakes that raise a clear error or are logged, instead of passing silently."""

import logging
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tallybook import App, Constant, Context, Snooze
from tallybook.errors import ConfigError, JobFailed
from tallybook.testing import drain_async


def limited(dsn: str, *keys: str, **options: Any) -> App:
    """An app whose one task names these limits, and has these options."""
    app = App("shop", dsn=dsn)

    @app.task(limits=keys, **options)
    async def call(provider: str) -> None: ...

    return app


async def test_a_worker_without_tasks_says_so_and_ends(dsn: str) -> None:
    """A worker without tasks raises an error at its start, with a hint on how to add them."""
    with pytest.raises(ConfigError, match="no tasks") as refused:
        await App("shop", dsn=dsn).run_worker()
    assert "include" in str(refused.value.hint)


async def test_a_limit_that_is_declared_nowhere_stops_the_worker_at_its_start(dsn: str) -> None:
    """A typo in limits= stops the worker before the first job fails, and the nearest limit is suggested."""
    app = limited(dsn, "provder")
    app.rate_limit("provider", 5, per="1 min")
    with pytest.raises(ConfigError, match=r"limits of task 'call': 'provder'") as refused:
        await app.run_worker()
    assert "'provider'" in str(refused.value.hint)


async def test_a_name_in_a_limit_that_is_no_argument_stops_the_worker(dsn: str) -> None:
    """A limit, fair key or unique key that names no argument, like `{provder}`, stops the worker."""
    app = limited(dsn, "provider:{provder}")
    app.rate_limit("provider", 5, per="1 min")
    with pytest.raises(ConfigError, match="no argument 'provder'") as refused:
        await app.run_worker()
    assert "'provider'" in str(refused.value.hint)
    with pytest.raises(ConfigError, match=r"fair_key of task 'call'.*no argument 'tenant'"):
        await limited(dsn, fair_key="tenant:{tenant}").run_worker()
    with pytest.raises(ConfigError, match=r"unique of task 'call'.*no argument 'user'"):
        await limited(dsn, unique=("provider", "user")).run_worker()


@pytest.mark.parametrize("key", ["provider", "provider:acme", "provider:{provider}", "other:{provider}"])
async def test_a_limit_of_code_or_of_the_database_lets_the_worker_start(dsn: str, db: Any, key: str) -> None:
    """A limit needs a rule of its name, the name above, or one key below, in code or in the database."""
    app = limited(dsn, key)
    app.rate_limit("provider", 5, per="1 min")
    app.concurrency_limits.set("other:acme", 3).sync(db)
    started: list[str] = []

    @app.lifespan
    async def life(ctx: Context) -> Any:
        started.append("started")
        yield

    app.tasks["call"].enqueue_sync(db, "acme")
    await app.drain()
    assert started == ["started"]


async def test_snoozed_and_limited_jobs_are_not_counted_as_failed(dsn: str, db: psycopg.Connection[Any]) -> None:
    """A snooze is not counted as failed; a failure that is retried is."""
    from tallybook._worker.entry import prepared

    app = App("shop", dsn=dsn)

    @app.task
    async def later() -> Snooze:
        return Snooze(timedelta(hours=1))

    @app.task(retry=Constant(timedelta(hours=1)))
    async def fails() -> None:
        raise ValueError("no")

    @app.task
    async def last() -> None:
        worker.stop()

    worker = prepared(app, dsn=dsn, queues={"default": 1}, notify=False)
    for task in (later, fails, last):
        task.enqueue_sync(db)
    report = await worker.run()
    assert (report.completed, report.failed, report.snoozed, report.dead) == (1, 1, 1, 0)


async def test_a_death_is_logged_as_one(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A failed last attempt logs an error that the job is dead; a failure that is retried does not."""
    app = App("shop", dsn=dsn)

    @app.task(max_attempts=1)
    async def dies() -> None:
        raise ValueError("no")

    @app.task(retry=Constant(timedelta(hours=1)))
    async def goes_on() -> None:
        raise ValueError("no")

    job = dies.enqueue_sync(db)
    goes_on.enqueue_sync(db)
    with caplog.at_level(logging.ERROR, logger="tallybook.worker"):
        await app.drain()
    assert [record.getMessage() for record in caplog.records] == [f"dies {job.id} is dead: attempt 1 was its last"]


async def test_a_drain_can_raise_what_a_handler_raised(dsn: str, db: psycopg.Connection[Any]) -> None:
    """For tests: after all jobs have run, a failure is raised with the handler's exception as its cause."""
    app = App("shop", dsn=dsn)
    ran: list[int] = []

    @app.task(retry=Constant(timedelta(hours=1)))
    async def charge(n: int) -> None:
        ran.append(n)
        if n:
            raise ValueError(f"card {n}")

    jobs = [charge.enqueue_sync(db, n) for n in range(3)]
    with pytest.raises(JobFailed, match="card") as failed:
        await drain_async(app, dsn=dsn, raise_on_failure=True)
    assert sorted(ran) == [0, 1, 2] and isinstance(failed.value.__cause__, ValueError)
    assert failed.value.job in {job.id for job in jobs[1:]} and failed.value.task == "charge"
    assert (await drain_async(app, dsn=dsn, raise_on_failure=True)).processed == 0
