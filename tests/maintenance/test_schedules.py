"""Schedules: one fire per tick, the overlap guard, missed ticks, run now and whole weeks, with clocks of the test."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from cronsim import CronSim

from support.hands import Hands
from support.ticking import MINUTE, NOON, SECOND, STEP, clocks, fires, one, put, run
from support.workers import eventually
from tallybook import App, Context
from tallybook._db.link import Link
from tallybook._maintenance.clock import Clock
from tallybook.errors import UnknownSchedule, WrongIsolationLevel

# One fire per tick


async def test_a_tick_is_fired_once_however_many_clocks_there_are(dsn: str, db: Any) -> None:
    """S2-04: eight clocks that look at the same instant fire each of 50 schedules once, every tick."""
    for n in range(50):
        put(db, f"s{n:02}", at=NOON, overlap=True)
    async with clocks(dsn, *[None] * 8) as all_of_them:
        for n in (1, 2, 3):
            at = NOON + n * STEP + 0.2 * SECOND
            for _ in range(2):  # a clock kept out by another looks again
                await asyncio.gather(*(clock.run(at=at) for clock in all_of_them))
    assert one(db, "select count(*) from tallybook.fire where what = 'enqueued'") == 150
    assert one(db, "select count(*), count(distinct schedule || tick) from tallybook.fire") == (150, 150)
    assert one(db, "select count(*) from tallybook.job where task = 't'") == 150
    assert one(db, "select min(fired_count), max(fired_count) from tallybook.schedule") == (3, 3)


async def test_the_job_of_a_fire(dsn: str, db: Any) -> None:
    """S2-01: a tick's job is a job like any other, with args, queue and options; it knows its schedule and tick."""
    app = App("shop", dsn=dsn)
    seen: list[Any] = []

    @app.task(queue="reports")
    async def report(ctx: Context, lang: str) -> None:
        seen.append((lang, ctx.schedule, ctx.tick, ctx.headers))

    described = report.with_(priority=1, max_attempts=3, headers={"trace": "x"}, retry="patient")
    app.retry_policy("patient", lambda failures: None)
    app.schedules.set("report-de", described.job("de"), every="10 min").sync(db)
    fired = app.schedules.run("report-de").sync(db)
    job = app.get(fired.job_id).sync(db)
    assert (job.queue, job.priority, job.max_attempts, job.args) == ("reports", 1, 3, {"lang": "de"})
    assert job.options["retry"] == "patient"
    await report.enqueue(app, "en")
    await app.drain()
    assert sorted(seen, key=str) == [
        ("de", "report-de", fired.tick, {"trace": "x"}),
        ("en", None, None, {}),
    ]


async def test_a_clock_that_dies_before_its_commit_has_fired_nothing(dsn: str, db: Any) -> None:
    """S2-03 S2-05: fire, job and next tick are one transaction: a clock that dies in it leaves none, another fires."""
    put(db, "s", at=NOON)
    async with clocks(dsn, None) as (clock,):
        await clock.run(at=NOON + SECOND)
        dying = await psycopg.AsyncConnection.connect(dsn)
        await dying.execute("select")
        left, ran = await clock._batch(dying, NOON + STEP)
        assert (left, ran.fired) == (False, 1)  # in a transaction that is still open
        assert fires(db) == []
        assert (await clock.run(at=NOON + STEP)).carried == 0  # it is locked, and nobody waits
        await dying.close()
        await eventually(
            lambda: one(
                db,
                "select count(*) from pg_locks where locktype = 'advisory'"
                " and database = (select oid from pg_database where datname = current_database())",
            ) == 0,
            "it is gone",
        )  # fmt: skip
        assert (await clock.run(at=NOON + STEP)).fired == 1
    assert fires(db) == ["enqueued"]
    assert one(db, "select count(*) from tallybook.job") == 1
    together = (
        "select f.xmin = e.xmin and f.xmin = s.xmin from tallybook.fire f, tallybook.entry e, tallybook.schedule s"
    )
    assert one(db, together) is True


async def test_a_clock_that_is_frozen_stops_nobody(dsn: str, db: Any) -> None:
    """S2-03: a clock frozen with the claim of its run delays the others by a second, not for ever."""
    put(db, "s", at=NOON)
    await run(dsn, NOON + SECOND)
    with psycopg.connect(dsn) as frozen:
        one(frozen, "select count(*) from tallybook._schedules_due(p_at => %s)", NOON + STEP)
        db.execute("update tallybook.service set last_run_at = %s where name = 'schedules'", (NOON + STEP,))
        async with clocks(dsn, None) as (clock,):
            assert (await clock.run(at=NOON + STEP + 0.5 * SECOND)).fired == 0
            assert (await clock.run(at=NOON + STEP + 1.5 * SECOND)).fired == 1


# The overlap guard


async def test_a_fire_whose_job_goes_on_keeps_the_next_from_firing(dsn: str, db: Any) -> None:
    """S2-02 S2-06: a tick is skipped while the job is available, running or in backoff: no error, no job, recorded."""
    put(db, "s", at=NOON)
    hands = Hands(db)
    await run(dsn, NOON + STEP)
    assert fires(db) == ["enqueued"]
    await run(dsn, NOON + 2 * STEP)  # available
    (job,) = hands.start()
    await run(dsn, NOON + 3 * STEP)  # running
    hands.fail(job, "1 hour")
    await run(dsn, NOON + 4 * STEP)  # in backoff
    assert fires(db, "s", "what", "reason") == [("enqueued", None), *[("skipped", "overlap")] * 3]
    assert one(db, "select count(*) from tallybook.job") == 1
    db.execute("update tallybook.scheduled set run_at = '-infinity'")
    assert hands.run_all() == [job.id]
    await run(dsn, NOON + 5 * STEP)
    assert fires(db)[-1] == "enqueued"
    assert one(db, "select fired_count, skipped_count, failed_count from tallybook.schedule") == (2, 3, 0)


@pytest.mark.parametrize("end", ["completed", "dead", "cancelled", "cancelled in line", "rescued", "crashed"])
async def test_nothing_stays_blocked(dsn: str, db: Any, end: str) -> None:
    """S2-05: after any end of the job, even by a dead worker or as a dead letter, the next tick fires."""
    put(db, "s", at=NOON)
    hands = Hands(db)
    await run(dsn, NOON + STEP)
    if end == "cancelled in line":
        db.execute("select tallybook.cancel(last_job_id) from tallybook.schedule")
    else:
        (job,) = hands.start()
        match end:
            case "completed":
                hands.complete(job)
            case "dead":
                hands.fail(job, final=True)
            case "cancelled":
                hands.say("cancel_running", job)
            case "rescued":
                hands.rescued()
                await run(dsn, NOON + 2 * STEP)
                assert fires(db) == ["enqueued", "skipped"]  # it is available again
                assert Hands(db).run_all() == [job.id]
            case "crashed":
                for _ in range(3):
                    hands.rescued()
                    hands = Hands(db)
                    hands.claim()
                assert one(db, "select reason from tallybook.dead") == "crashed"
    await run(dsn, NOON + 3 * STEP)
    assert fires(db)[-1] == "enqueued"


async def test_the_guard_can_be_opted_out_of(dsn: str, db: Any) -> None:
    """S2-06: with overlap a tick fires even if the last one's job has not ended."""
    put(db, "s", at=NOON, overlap=True)
    await run(dsn, NOON + STEP, NOON + 2 * STEP, NOON + 3 * STEP)
    assert fires(db) == ["enqueued"] * 3


async def test_a_rolled_back_fire_leaves_nothing(dsn: str, db: Any, connect: Any) -> None:
    """S2-03: the guard is rows beside the jobs: a transaction that fails leaves neither fire nor job."""
    put(db, "s", at=NOON)
    with pytest.raises(ZeroDivisionError), connect(autocommit=False) as conn:
        assert one(conn, "select what from tallybook.schedule_run('s')") == "enqueued"
        raise ZeroDivisionError
    assert fires(db) == [] and one(db, "select count(*) from tallybook.job") == 0
    assert one(db, "select what from tallybook.schedule_run('s')") == "enqueued"


# Run now


async def test_run_now_takes_the_same_path(dsn: str, db: Any) -> None:
    """S2-13: run now enqueues a job with retries, is recorded, and its guard holds for ticks and the next run now."""
    put(db, "s", at=NOON, max_attempts=2)
    hands = Hands(db)
    what, reason, job_id, jobs = one(db, "select what, reason, job_id, jobs from tallybook.schedule_run('s', %s)", NOON)
    assert (what, reason, jobs) == ("enqueued", None, 1)
    assert one(db, "select what, reason, job_id from tallybook.schedule_run('s', %s)", NOON) == (
        "skipped",
        "overlap",
        None,
    )
    await run(dsn, NOON + STEP)
    assert fires(db) == ["enqueued", "skipped", "skipped"]
    (job,) = hands.start()
    assert (job.id, hands.fail(job)) == (job_id, "available")  # retried like any job
    assert one(db, "select what from tallybook.schedule_run('s', %s)", NOON + STEP) == "skipped"
    (job,) = hands.start()
    assert hands.fail(job) == "dead"
    assert one(db, "select what from tallybook.schedule_run('s', %s)", NOON + STEP) == "enqueued"
    assert one(db, "select tick, due_at from tallybook.schedule") == (NOON + 2 * STEP, NOON + 2 * STEP)


async def test_run_now_waits_for_a_fire_in_flight_and_sees_its_job(dsn: str, db: Any, connect: Any) -> None:
    """S2-13 S2-02: run now waits for a fire's open transaction, and is skipped because of the fire's job."""
    put(db, "s", at=NOON)
    await run(dsn, NOON + SECOND)
    with connect(autocommit=False) as firing:
        assert one(firing, "select what from tallybook.schedule_run('s')") == "enqueued"
        second = connect()
        waiting = asyncio.create_task(
            asyncio.to_thread(one, second, "select what, reason from tallybook.schedule_run('s')")
        )
        await eventually(
            lambda: (
                one(
                    db,
                    "select count(*) from pg_stat_activity"
                    " where datname = current_database() and wait_event_type = 'Lock'",
                )
                == 1
            ),
            "it waits",
        )
        firing.commit()
        assert await waiting == ("skipped", "overlap")


async def test_run_now_of_what_is_not_there(dsn: str, db: Any, connect: Any) -> None:
    """S2-13: run now raises UnknownSchedule, refuses an old snapshot, and fires a paused schedule."""
    app = App("shop", dsn=dsn)
    with pytest.raises(UnknownSchedule, match="there is no schedule"):
        app.schedules.run("s").sync(db)
    put(db, "s", at=NOON)
    with connect(autocommit=False) as conn:
        conn.execute("set transaction isolation level repeatable read")
        with pytest.raises(WrongIsolationLevel):
            app.schedules.run("s").sync(conn)
    app.schedules.pause("s").sync(db)
    assert (await app.schedules.run("s")).what == "enqueued"
    assert (await app.schedules.run("s")).reason == "overlap"


# Missed ticks


@pytest.mark.parametrize(
    ("missed", "what"),
    [
        ("once", [("missed", 5), ("enqueued", None)]),
        ("skip", [("missed", 6)]),
        ("all", [("missed", 3), *[("enqueued", None)] * 3]),
    ],
)
async def test_ticks_of_a_downtime(dsn: str, db: Any, missed: str, what: list[Any]) -> None:
    """S2-16: after an hour without a clock: the latest tick, none, or the latest three; one row counts the others."""
    put(db, "s", at=NOON, missed=missed, catch_up=3, overlap=True)
    await run(dsn, NOON + SECOND, NOON + 65 * MINUTE)
    assert fires(db, "s", "what", "ticks") == what
    assert one(db, "select missed_count, tick from tallybook.schedule") == (what[0][1], NOON + 70 * MINUTE)


async def test_catching_up_goes_one_by_one(dsn: str, db: Any) -> None:
    """S2-02: caught-up ticks run one by one, behind a job that still runs; then ticks skip as before."""
    put(db, "s", at=NOON, missed="all", catch_up=3)
    hands = Hands(db)
    await run(dsn, NOON + STEP)
    (first,) = hands.start()  # then no clock runs for half an hour
    await run(dsn, NOON + 45 * MINUTE)
    assert fires(db) == ["enqueued"] * 4
    assert hands.start() == []
    await run(dsn, NOON + 50 * MINUTE)
    assert fires(db)[-1] == "skipped"
    hands.complete(first)
    order = hands.run_all()
    assert order == sorted(order) and len(order) == 3
    await run(dsn, NOON + 60 * MINUTE)
    assert fires(db)[-1] == "enqueued"


async def test_the_guard_knows_all_that_is_being_caught_up(dsn: str, db: Any) -> None:
    """S2-02: while any of several caught-up jobs is open the next tick is skipped, even if the last was cancelled."""
    put(db, "s", at=NOON, missed="all")
    hands = Hands(db)
    await run(dsn, NOON + SECOND, NOON + 25 * MINUTE)
    (first,) = hands.start()
    db.execute("select tallybook.cancel(last_job_id) from tallybook.schedule")
    await run(dsn, NOON + 30 * MINUTE)
    assert fires(db) == ["enqueued", "enqueued", "skipped"]
    hands.complete(first)
    await run(dsn, NOON + 40 * MINUTE)
    assert fires(db)[-1] == "enqueued"


async def test_catching_up_does_not_overlap_with_a_job_of_an_older_definition(dsn: str, db: Any) -> None:
    """S2-02: while a job from before the change to catching up is open, missed ticks are skipped, not caught up."""
    put(db, "s", at=NOON)
    await run(dsn, NOON + STEP)
    put(db, "s", at=NOON + STEP, missed="all")
    await run(dsn, NOON + 25 * MINUTE, NOON + 35 * MINUTE)
    assert fires(db) == ["enqueued", "skipped", "skipped"]


async def test_nothing_is_missed_in_a_pause(dsn: str, db: Any) -> None:
    """S2-16: a paused schedule does not fire; resumed, it fires from its next tick on, and none counts as missed."""
    put(db, "s", at=NOON)
    assert one(db, "select tallybook.schedule_pause('s', 'ada', %s)", NOON)
    assert not one(db, "select tallybook.schedule_pause('s', 'eve', %s)", NOON)
    assert one(db, "select paused_by from tallybook.schedule") == "ada"
    await run(dsn, NOON + STEP, NOON + 2 * STEP)
    assert one(db, "select tallybook.schedule_resume('s', %s)", NOON + 25 * MINUTE)
    assert not one(db, "select tallybook.schedule_resume('s', %s)", NOON)
    await run(dsn, NOON + 25 * MINUTE, NOON + 3 * STEP)
    assert fires(db, "s", "tick", "what") == [(NOON + 3 * STEP, "enqueued")]


# Weeks of virtual time, while clocks start and die and the app is upgraded

CODE = {
    "half-hourly": "*/30 * * * *",
    "at-half-past-two": "30 2 * * *",
    "at-a-quarter-to": "45 * * * *",
    "in-the-night": "0,20,40 1-3 * * *",
    "with-seconds": "15 10,12 2 * * *",
    "late": "0 15 23 * * *",
    "weekdays": "5 9-17/4 * * MON-FRI",
}
MOVED = "*/45 */3 * * *"  # half-hourly after the upgrade


def release(tz: str, upgraded: bool) -> App:
    app = App("shop")

    @app.task(queue="q")
    async def t(n: int = 0) -> None: ...

    for name, cron in CODE.items():
        moved = upgraded and name == "half-hourly"
        app.schedule(name, t.job(1 if upgraded else 0), cron=MOVED if moved else cron, tz=tz)
    if upgraded:
        app.schedule("new", t.job(), cron="7 * * * *", tz=tz)
    return app


@pytest.mark.parametrize(
    "week",
    [
        pytest.param("berlin-spring", marks=pytest.mark.slow),
        pytest.param("berlin-autumn", marks=pytest.mark.slow),
        "lord-howe-autumn",
    ],
)
async def test_a_week_across_a_change(dsn: str, db: Any, week: str) -> None:
    """S2-04 S2-11: a week across a change of offset fires exactly cronsim's ticks, each once, none missed or skipped.

    Clocks start, and die in the middle of a fire, and the app is upgraded.
    """

    def started(dsn: str, app: App) -> Clock:
        links = Link(dsn, "clock"), Link(dsn, "clock")
        return Clock(*links, app=app.name, declared=app._declared_schedules)

    def said_by_cronsim(cron: str, tz: str, start: datetime, end: datetime) -> list[datetime]:
        """Return the ticks after start and up to end, iterated without a pause from a day before."""
        ticks = (tick.astimezone(UTC) for tick in CronSim(cron, (start - timedelta(days=1)).astimezone(ZoneInfo(tz))))
        return [tick for tick in dict.fromkeys(takewhile(lambda tick: tick <= end, ticks)) if tick > start]

    kept = {"sundays": "0 0,2,3 * * SUN", "two-hourly": "0 */2 * * *"}
    weeks = {
        "berlin-spring": ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC), 7),
        "berlin-autumn": ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC), 7),
        "lord-howe-autumn": ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC), 3),
    }
    tz, change, days = weeks[week]
    luck = random.Random(week)
    start = change - timedelta(days=days / 2, hours=luck.uniform(-9, 9))
    end, upgrade = start + timedelta(days=days), change + timedelta(hours=luck.uniform(-3, 3))
    hands = Hands(db)
    for name, cron in kept.items():
        put(db, name, cron=cron, tz=tz, at=start)
    at, upgraded, died = start, False, 0
    db.execute("set timezone = 'UTC'")

    async with clocks(dsn, release(tz, False), None, None) as running:
        await running[0].run(at=at)
        while True:
            due = one(db, "select min(due_at) from tallybook.schedule")
            at = max(at, due + timedelta(seconds=luck.choice([0, 0.01, luck.uniform(0, 50)])))
            if not upgraded and at >= upgrade:
                at = max(at, upgrade)
                running.append(started(dsn, release(tz, True)))
                upgraded, upgrade = True, at
                await running[-1].run(at=at)  # fires the old release's due ticks, then registers the new one
                hands.complete(*hands.start())
                continue
            if at > end:
                break
            if luck.random() < 0.05:
                async with await psycopg.AsyncConnection.connect(dsn) as dying:  # it fires, and dies before its commit
                    await dying.execute("select")
                    await running[0]._batch(dying, at)
                    await dying.rollback()
                died += 1
            elif luck.random() < 0.05:  # another worker of the current release starts
                running.append(started(dsn, release(tz, upgraded)))
                await running[-1].register(at=at)
            await luck.choice(running).run(at=at)
            hands.complete(*hands.start())

    expected = {name: said_by_cronsim(cron, tz, start, end) for name, cron in {**CODE, **kept}.items()}
    expected["half-hourly"] = said_by_cronsim(CODE["half-hourly"], tz, start, upgrade) + said_by_cronsim(
        MOVED, tz, upgrade, end
    )
    expected["new"] = said_by_cronsim("7 * * * *", tz, upgrade, end)
    assert died > 5 and len(running) > 5
    for name, ticks in expected.items():
        assert fires(db, name, "tick") == ticks, name
    assert set(fires(db)) == {"enqueued"}
    assert one(db, "select count(*) from tallybook.entry") == sum(map(len, expected.values()))
