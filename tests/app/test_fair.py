"""Fairness in Python and in running workers. sql/test_fairness.py covers the rounds."""

import asyncio
import math
import time
from typing import Any

import pytest

from support.workers import SLEEPY, eventually, working
from tallybook import App
from tallybook._db.link import Link
from tallybook._maintenance.releases import FairRelease
from tallybook.errors import ConfigError


def test_the_key_comes_from_the_args(app: App, db: Any) -> None:
    """fair_key="tenant:{tenant}" is filled from each job's args; with_ sets it for one job."""

    def key_of(db: Any, job: int) -> Any:
        return db.execute("select options ->> 'fair_key', state from tallybook.job where id = %s", (job,)).fetchone()

    @app.task(fair_key="tenant:{tenant}")
    def export(tenant: int) -> None: ...

    assert key_of(db, export.enqueue_sync(db, 42).id) == ("tenant:42", "waiting")
    assert key_of(db, export.with_(fair_key="other").enqueue_sync(db, 42).id) == ("other", "waiting")


def test_what_does_not_fit_is_refused(app: App) -> None:
    """ConfigError for a fair key that is empty, too long, not text, beside an order key, or of a wrong argument."""

    @app.task
    def export(tenant: float) -> None: ...

    for wrong in ("", "x" * 201, 7):
        with pytest.raises(ConfigError):
            export.with_(fair_key=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order key"):
        export.with_(fair_key="a", order_key="o")
    with pytest.raises(ConfigError, match="fair_key"):
        export.with_(fair_key="{customer}").job(1.0)
    with pytest.raises(ConfigError, match="neither a string nor an integer"):
        export.with_(fair_key="{tenant}").job(1.0)


@pytest.mark.slow
async def test_a_tenants_jobs_do_not_hold_up_another_tenants(app: App, dsn: str, db: Any) -> None:
    """After 2,000 jobs of one tenant, one each of 20 others start among the first 421, and all run once."""
    order: list[str] = []

    @app.task(fair_key="{tenant}")
    async def export(tenant: str, n: int) -> None:
        order.append(tenant)
        await asyncio.sleep(0)

    app.enqueue_many_sync(db, [export.job("big", n) for n in range(2000)])
    app.enqueue_many_sync(db, [export.job(f"small{n}", 0) for n in range(20)])
    async with working(app, dsn):
        await eventually(lambda: len(order) == 2020, "all have run", seconds=60)
    assert max(at for at, tenant in enumerate(order) if tenant != "big") < 2 * 200 + 21
    assert db.execute("select count(*) from tallybook.waiting").fetchone() == (0,)


@pytest.mark.direct("a worker behind a pooler is not woken: it polls")
async def test_a_waiting_worker_starts_a_fair_job_at_once(app: App, dsn: str, db: Any) -> None:
    """A producer wakes the service, and that the worker: six jobs start sooner than by polling."""
    started: list[float] = []

    @app.task(fair_key="{tenant}")
    async def export(tenant: str) -> None:
        started.append(time.monotonic())

    took = []
    async with working(app, dsn, **SLEEPY):
        for n in range(6):
            begin = time.monotonic()
            export.enqueue_sync(db, f"t{n}")
            await eventually(lambda n=n: len(started) == n + 1, "it has started")
            took.append(started[-1] - begin)
    assert sum(took) < 4, took  # polling finds most of them only after two seconds


async def test_two_workers_run_all_of_them(app: App, dsn: str, db: Any) -> None:
    """Two workers that both release fair jobs run each job once."""
    seen: list[int] = []

    @app.task(fair_key="{tenant}")
    async def export(tenant: int, n: int) -> None:
        seen.append(n)

    app.enqueue_many_sync(db, [export.job(n % 7, n) for n in range(1500)])
    async with working(app, dsn), working(app, dsn):
        await eventually(lambda: len(seen) >= 1500, "all have run", seconds=60)
    assert sorted(seen) == list(range(1500))


async def test_drain_deals(app: App, dsn: str, db: Any) -> None:
    """app.drain runs all fair jobs, even more than a lane gets at once."""

    @app.task(fair_key="{tenant}")
    async def export(tenant: int) -> None: ...

    app.enqueue_many_sync(db, [export.job(n % 3) for n in range(450)])
    assert (await app.drain(dsn=dsn)).completed == 450


async def test_a_worker_that_starts_finds_what_was_left(app: App, dsn: str, db: Any) -> None:
    """A starting worker runs old unreleased jobs within 5 s, even if the id sequence is 20,000 ahead."""
    seen: list[int] = []

    @app.task(fair_key="{tenant}")
    async def export(tenant: int) -> None:
        seen.append(tenant)

    app.enqueue_many_sync(db, [export.job(n) for n in range(3)])
    db.execute("select tallybook.fair_release(max_line => 0, as_service => true)")
    db.execute("select setval('tallybook.job_id', nextval('tallybook.job_id') + 20000)")
    begin = time.monotonic()
    async with working(app, dsn):
        await eventually(lambda: len(seen) == 3, "all have run")
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("slots", "workers", "remain", "claims", "runs"),
    [
        (10, 1, True, [(60, False), (39, False)], False),
        (10, 1, True, [(60, False), (40, False)], True),
        (10, 4, True, [(25, False)], True),
        (100, 1, True, [(100, False)], False),
        (100, 1, True, [(200, False)], True),
        (5000, 1, True, [(500, False)], True),
        (10, 1, False, [(1, True)], True),
        (10, 1, True, [(0, True)], True),
        (10, 1, False, [(0, True)], False),
    ],
)
async def test_claims_add_up_to_a_run(
    slots: int, workers: int, remain: bool, claims: list[tuple[int, bool]], runs: bool
) -> None:
    """Release runs once a worker claimed its share of half the line, or a claim was short while jobs wait."""
    release = FairRelease(Link("", "w"), asyncio.Event(), lambda: None, slots=slots)
    release.run_at, release._remain = math.inf, remain
    release.pause(workers)
    for jobs, short in claims:
        release.claimed(jobs, short)
    assert (release.run_at < math.inf) is runs
