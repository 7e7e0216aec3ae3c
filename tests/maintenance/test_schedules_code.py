"""Schedules in code, problems with schedules, and the workers that fire them."""

import asyncio
import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from support.ticking import MINUTE, NOON, SECOND, STEP, clocks, declaring, fires, one, put, run
from support.waiting import wait_until
from support.worker_process import Workers
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Context
from tallybook.errors import ConfigError, InvalidArgument, UnknownSchedule

# Schedules in code


async def test_schedules_in_code_are_registered(dsn: str, db: Any) -> None:
    """S2-11: a worker's start registers them, changes them in place, drops those gone from the code, keeps a pause."""
    declared = "select name, cron, every, args from tallybook.schedule order by name"
    releases = [
        declaring(
            a={"cron": "0 * * * *"}, b={"every": "5 min", "args": (1,)}, c={"cron": "@daily", "tz": "Asia/Tokyo"}
        ),
        declaring(a={"cron": "30 * * * *"}, b={"every": "5 min", "args": (2,)}),
        declaring(),
    ]
    async with clocks(dsn, *releases) as (first, second, third):
        await first.run(at=NOON)
        assert [row[:2] for row in db.execute(declared).fetchall()] == [
            ("a", "0 * * * *"),
            ("b", None),
            ("c", "@daily"),
        ]
        db.execute("select tallybook.schedule_pause('a'), tallybook.schedule_pause('c')")
        await second.run(at=NOON + MINUTE)
        assert [(row[0], row[1], row[3]) for row in db.execute(declared).fetchall()] == [
            ("a", "30 * * * *", {}),
            ("b", None, {"n": 2}),
        ]
        assert one(db, "select count(*) from tallybook.schedule where paused_at is not null") == 1
        assert one(db, "select tick from tallybook.schedule where name = 'b'") == NOON + 5 * MINUTE  # not replanned
        await third.run(at=NOON + 2 * MINUTE)
        assert db.execute(declared).fetchall() == []


async def test_the_same_release_again_writes_nothing(dsn: str, db: Any) -> None:
    """S2-11: a worker that starts with unchanged schedules writes no row, and waits for no lock on one."""
    app = declaring(a={"cron": "0 * * * *", "jitter": "5 s"}, b={"every": "5 min", "args": (1,)})
    async with clocks(dsn, app, app) as (first, second):
        await first.run(at=NOON)
        before = db.execute("select xmin, ctid, s from tallybook.schedule s order by name").fetchall()
        with psycopg.connect(dsn) as holding:
            holding.execute("select from tallybook.schedule for update")
            await second.register(at=NOON + MINUTE)
            assert second._declared is None
        assert db.execute("select xmin, ctid, s from tallybook.schedule s order by name").fetchall() == before


async def test_a_locked_schedule_is_registered_later(dsn: str, db: Any) -> None:
    """S2-11: an open transaction that locks the row does not stop a worker's start: it registers a little later."""
    old, new = declaring(a={"cron": "0 * * * *"}), declaring(a={"cron": "5 * * * *"})
    async with clocks(dsn, old, new) as (first, second):
        await first.run(at=NOON)
        with psycopg.connect(dsn) as holding:
            holding.execute("select from tallybook.schedule for update")
            await second.register(at=NOON)
            assert second._declared is not None
        second._register_at = 0.0
        await second.register(at=NOON)
    assert one(db, "select cron from tallybook.schedule") == "5 * * * *"


async def test_a_changed_expression_counts_from_the_change(dsn: str, db: Any) -> None:
    """S2-11: a changed expression fires at its own ticks only, from the change on; other changes keep the next tick."""
    put(db, "s", cron="0 * * * *", at=NOON, overlap=True)
    await run(dsn, NOON, NOON + 60 * MINUTE)
    assert put(db, "s", cron="15 * * * *", at=NOON + 70 * MINUTE, overlap=True) == "changed"
    assert put(db, "s", cron="15 * * * *", at=NOON + 71 * MINUTE, overlap=True) == "unchanged"
    assert put(db, "s", cron="15 * * * *", at=NOON + 72 * MINUTE, overlap=True, priority=1) == "changed"
    await run(dsn, *(NOON + n * MINUTE for n in range(70, 200, 1)))
    assert fires(db, "s", "tick") == [NOON + n * MINUTE for n in (60, 75, 135, 195)]


async def test_a_name_has_one_owner(dsn: str, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S2-11: code overwrites no schedule of the database or of another app, and the database none of code."""
    app, other = declaring(mine={"cron": "@daily"}, theirs={"cron": "@daily"}), App("other")
    put(db, "theirs", cron="@hourly", at=NOON)
    other.task(schedule="@hourly", name="mine")(lambda: None)
    async with clocks(dsn, app, other) as (first, second):
        with caplog.at_level(logging.WARNING):
            await first.run(at=NOON)
            await second.run(at=NOON)
    assert one(db, "select cron, source from tallybook.schedule where name = 'theirs'") == ("@hourly", "database")
    assert one(db, "select cron, app from tallybook.schedule where name = 'mine'") == ("@daily", "shop")
    assert "app 'shop' declares it, and it belongs to the database" in caplog.text
    assert "app 'other' declares it, and it belongs to app 'shop'" in caplog.text
    with pytest.raises(InvalidArgument, match='schedule "mine" is declared in the code of app "shop"'):
        app.schedules.set("mine", app.tasks["t"].job(), every="5 min").sync(db)


# What goes wrong


async def test_an_expression_that_cannot_be_read_stops_no_other(
    dsn: str, db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-16: an expression that no worker can read is recorded, logged and tried again, and the others fire."""
    put(db, "bad", cron="61 * * * *", at=NOON)
    put(db, "odd", cron="0 * * * *", tz="EST5EDT4,M3.2.0,M11.1.0", at=NOON)
    put(db, "good", at=NOON)
    await run(dsn, NOON + SECOND, NOON + STEP)
    assert fires(db) == ["enqueued"]
    assert "'61' does not fit the field minute" in one(db, "select problem from tallybook.schedule where name = 'bad'")
    assert "unknown time zone" in one(db, "select problem from tallybook.schedule where name = 'odd'")
    assert "schedule 'bad': its ticks cannot be computed" in caplog.text
    assert one(db, "select due_at from tallybook.schedule where name = 'bad'") == NOON + SECOND + timedelta(hours=1)
    put(db, "bad", cron="1 * * * *", at=NOON + 2 * STEP)
    assert one(db, "select problem from tallybook.schedule where name = 'bad'") is None
    await run(dsn, NOON + 2 * STEP, NOON + 61 * MINUTE)
    assert fires(db, "bad") == ["enqueued"]


async def test_a_schedule_that_cannot_be_fired_stops_no_other(dsn: str, db: Any) -> None:
    """S2-16: a row broken by hand is recorded as failed, with the reason, tick by tick; the others fire."""
    for name in ("a", "b", "c"):
        put(db, name, at=NOON)
    await run(dsn, NOON + SECOND)
    db.execute("update tallybook.schedule set queue = '' where name = 'b'")
    await run(dsn, NOON + STEP, NOON + 2 * STEP)
    assert fires(db, None, "schedule", "what")[:3] == [("a", "enqueued"), ("b", "failed"), ("c", "enqueued")]
    assert fires(db, "b", "reason") == ["a queue has 1 to 64 bytes, this one has 0"] * 2
    assert one(db, "select failed_count, fired_count, tick from tallybook.schedule where name = 'b'") == (
        2,
        0,
        NOON + 3 * STEP,
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cron": "@daily", "every": "5 min"}, "needs a cron expression or an interval"),
        ({"cron": "every 5 min"}, "a cron expression must have 5 fields"),
        ({"every": "1 month"}, "out of range"),
        ({"every": "0"}, "out of range"),
        ({"tz": "Mars/Base", "cron": "@daily"}, "unknown time zone"),
        ({"jitter": "-1 s"}, "jitter"),
        ({"missed": "twice"}, "missed"),
        ({"catch_up": 0}, "catch_up"),
        ({"queue": ""}, "a queue has 1 to 64 bytes"),
        ({"task": "a\nb"}, "control or invisible characters"),
        ({"name": ""}, "a schedule name"),
        ({"priority": -1}, "priority"),
        ({"args": "[]"}, "args are one JSON object"),
    ],
)
async def test_sql_refuses_what_cannot_tick(db: Any, more: dict[str, Any], words: str) -> None:
    """S2-11: schedule_set refuses with TB005, by name, values that could make no job."""
    with pytest.raises(psycopg.Error, match=words) as error:
        put(db, **{"name": "s", "at": NOON, **more})
    assert error.value.sqlstate == "TB005"


# Workers


@pytest.mark.slow
@pytest.mark.direct("kills processes that hold sessions")
def test_workers_that_are_killed_leave_no_gap(dsn: str, db: Any) -> None:
    """S2-04, S2-05: while three workers are killed and replaced one by one, each second of five schedules fires once.

    Every job completes.
    """
    for n in range(5):
        put(
            db,
            f"s{n}",
            task="note",
            queue="default",
            cron="* * * * * *",
            tz="Europe/Berlin",
            overlap=True,
            args=f'{{"n": {n}}}',
            at="now",
        )
    with Workers(dsn, db) as workers:
        running = [workers.start() for _ in range(3)]
        for _ in range(3):
            seen = len(fires(db))
            wait_until(lambda seen=seen: len(fires(db)) >= seen + 5, "a second of fires")  # type: ignore[misc]
            running.pop(0).signal(signal.SIGKILL)
            running.append(workers.start())
        db.execute("select tallybook.schedule_pause(name) from tallybook.schedule")
        open_jobs = "select count(*) from tallybook.job where state <> 'completed'"
        wait_until(lambda: one(db, open_jobs) == 0, "every job has completed", seconds=30)
    for n in range(5):
        ticks = fires(db, f"s{n}", "tick")
        assert ticks == [ticks[0] + n * SECOND for n in range(len(ticks))] and len(ticks) >= 3
    assert set(fires(db)) == {"enqueued"}
    assert one(db, "select count(*) from tallybook.job") == len(fires(db))


@pytest.mark.slow
async def test_workers_fire_to_the_moment(dsn: str, db: Any) -> None:
    """S2-01 S2-04: two workers fire each second of a schedule once, never early, and run every job."""
    app = App("shop", dsn=dsn)
    seen: list[Any] = []

    @app.task
    async def sweep(ctx: Context) -> None:
        seen.append((ctx.tick, datetime.now(UTC)))

    # If the machine stalls for a second, two ticks fire at once: the second must not be skipped because of the first.
    app.schedule("sweep", sweep.job(), cron="* * * * * *", tz="Europe/Berlin", overlap=True)
    async with working(app, dsn), working(app, dsn):
        await eventually(lambda: len({tick for tick, _ in seen}) >= 3, "three ticks")
        app.schedules.pause("sweep").sync(db)
        await eventually(lambda: len(seen) == len(fires(db)), "all that was fired has run")
    ticks = [tick for tick, _ in seen]
    assert len(ticks) == len(set(ticks))
    assert sorted(ticks) == [min(ticks) + n * SECOND for n in range(len(ticks))]
    assert all(at >= tick for tick, at in seen)
    assert set(fires(db)) == {"enqueued"}


@pytest.mark.parametrize("query", [None, "select 'k' as key, '{}'::jsonb as args"])
async def test_handlers_that_use_all_threads_of_the_loop_delay_no_schedule(
    dsn: str, db: Any, query: str | None
) -> None:
    """A worker fires schedules while handlers occupy every thread of asyncio's default executor."""
    app, begun, release = App("shop", dsn=dsn), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    @app.task
    async def occupies() -> None:
        await asyncio.to_thread(lambda: begun.set() or release.wait(60))

    async with working(app, dsn):
        try:
            occupies.enqueue_sync(db)
            await eventually(begun.is_set, "the thread is busy")
            put(db, "s", at=datetime.now(UTC), every="1 s", **({"query": query} if query else {}))
            await eventually(lambda: fires(db, "s"), "a fire", seconds=10)
        finally:
            release.set()


@pytest.mark.direct("is told by a notification")
async def test_a_worker_is_told_of_a_new_schedule(dsn: str, db: Any) -> None:
    """S2-01: a schedule that is set while workers sleep is planned at once, not at their next look."""

    async def _nothing() -> None: ...

    db.execute("update tallybook.service set every = '1 hour' where name = 'schedules'")
    app = App("shop", dsn=dsn)
    async with working(app, dsn, **SLEEPY) as worker:
        assert worker.sleeper is not None
        await eventually(lambda: worker.sleeper.clear, "it sleeps")
        await eventually(
            lambda: one(db, "select last_run_at is not null from tallybook.service where name = 'schedules'"), "a look"
        )
        app.schedules.set("s", app.task(name="t")(_nothing).job(), every="1 s").sync(db)
        await eventually(lambda: fires(db, "s"), "its first fire")


async def test_drain_fires_what_is_due(dsn: str, db: Any) -> None:
    """S4-07: drain registers the app's schedules and fires due ones before it runs the jobs; if none is due, none."""
    app = App("shop", dsn=dsn)
    seen: list[Any] = []

    @app.task(schedule=timedelta(minutes=5))
    async def sweep(ctx: Context) -> None:
        seen.append(ctx.tick)

    await app.drain()
    assert seen == [] and one(db, "select name, source from tallybook.schedule") == ("sweep", "code")
    db.execute("update tallybook.schedule set tick = tick - interval '1 h', due_at = due_at - interval '1 h'")
    assert (await app.drain()).completed == 1
    assert len(seen) == 1 and fires(db) == ["missed", "enqueued"]
    assert (await app.drain()).completed == 0


async def test_a_worker_with_a_wrong_schedule_does_not_start(dsn: str) -> None:
    """S2-11: an error that shows only when annotations are read stops the worker's start, with a clear message."""
    app = App("shop", dsn=dsn)

    @app.task(schedule="@daily")
    async def report(lang: str) -> None: ...

    with pytest.raises(ConfigError, match=r"app\.schedule\('report'"):
        await app.drain()


async def test_what_the_app_tells_of_its_schedules(dsn: str, db: Any) -> None:
    """S2-16: list, next ticks, and fires with their jobs' states, in Python; both forms of each verb."""
    app = App("shop", dsn=dsn)

    @app.task(queue="q")
    async def t(n: int) -> None: ...

    assert await app.schedules.set("s", t.job(1), cron="0 6 * * *", tz="Europe/Berlin", jitter="5 min") == "created"
    assert (
        app.schedules.set("s", t.job(1), cron="0 6 * * *", tz="Europe/Berlin", jitter="5 min").sync(db) == "unchanged"
    )
    (found,) = await app.schedules.list()
    assert (found.rule, found.jitter, found.source, found.args) == (
        "0 6 * * * Europe/Berlin",
        5 * MINUTE,
        "database",
        {"n": 1},
    )
    ticks = await app.schedules.next("s", 3)
    assert [b - a for a, b in pairwise(ticks)][-1] in (timedelta(hours=n) for n in (23, 24, 25))
    assert ticks == app.schedules.next("s", 3).sync(db)
    await app.schedules.run("s")
    await app.schedules.run("s")
    told = [(fire.what, fire.reason, fire.job_state) for fire in await app.schedules.fires("s")]
    assert told == [("skipped", "overlap", None), ("enqueued", None, "available")]
    await Jobs(app, db).app.drain()
    assert [fire.job_state for fire in app.schedules.fires("s", max_fires=2).sync(db)] == [None, "completed"]
    (found,) = app.schedules.list().sync(db)
    assert (found.fired_count, found.skipped_count, found.last_what) == (1, 1, "skipped")
    assert await app.schedules.pause("s") is True and app.schedules.pause("s").sync(db) is False
    assert app.schedules.resume("s").sync(db) is True and await app.schedules.resume("s") is False
    assert await app.schedules.drop("s") is True and app.schedules.drop("s").sync(db) is False
    with pytest.raises(UnknownSchedule):
        await app.schedules.next("s")
