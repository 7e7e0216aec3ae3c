"""Schedules: one fire a tick, the overlap guard, missed ticks, registration, run now; by clocks that are told the time."""

from __future__ import annotations

import asyncio
import logging
import signal
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from support.hands import Hands
from support.ticking import clocks, fires, one, put
from support.waiting import wait_until
from support.worker_process import Workers
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Context
from tallybook.errors import ConfigError, InvalidArgument, UnknownSchedule, WrongIsolationLevel

pytestmark = pytest.mark.anyio

NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
STEP = timedelta(minutes=10)


def declaring(**schedules: dict[str, Any]) -> App:
    """An app with one task and these schedules of it."""
    app = App("shop")

    @app.task(queue="q")
    async def t(n: int = 0) -> None: ...

    for name, timing in schedules.items():
        args = timing.pop("args", ())
        app.schedule(name.replace("_", "-"), t.job(*args), **timing)
    return app


async def run(dsn: str, *instants: datetime) -> None:
    """One clock, run at these instants."""
    async with clocks(dsn, None) as (clock,):
        for at in instants:
            await clock.run(at=at)


# One fire a tick


async def test_a_tick_is_fired_once_however_many_clocks_there_are(dsn: str, db: Any) -> None:
    """S2-04: eight clocks that look at the same instant fire each of 50 schedules once, tick after tick."""
    for n in range(50):
        put(db, f"s{n:02}", at=NOON, overlap=True)
    async with clocks(dsn, *[None] * 8) as all_of_them:
        for n in (1, 2, 3):
            at = NOON + n * STEP + 0.2 * SECOND
            for _ in range(2):  # who was kept out by another looks again
                await asyncio.gather(*(clock.run(at=at) for clock in all_of_them))
    assert one(db, "select count(*) from tallybook.fire where what = 'enqueued'") == 150
    assert one(db, "select count(*), count(distinct schedule || tick) from tallybook.fire") == (150, 150)
    assert one(db, "select count(*) from tallybook.job where task = 't'") == 150
    assert one(db, "select min(fired_count), max(fired_count) from tallybook.schedule") == (3, 3)


async def test_the_job_of_a_fire(dsn: str, db: Any) -> None:
    """S2-01: what a tick puts in is a job like any other, with args, queue and options, that knows its schedule and its tick."""
    app = App("shop", dsn=dsn)
    seen: list[Any] = []

    @app.task(queue="reports")
    async def report(ctx: Context, lang: str) -> None:
        seen.append((lang, ctx.schedule, ctx.tick, ctx.headers))

    described = report.with_(priority=1, max_attempts=3, headers={"trace": "x"}, retry="patient")
    app.retry_policy("patient", lambda failures: None)
    app.schedule_put_sync(db, "report-de", described.job("de"), every="10 min")
    fired = app.schedule_run_sync(db, "report-de")
    job = app.get_sync(db, fired.job_id)
    assert (job.queue, job.priority, job.max_attempts, job.args) == ("reports", 1, 3, {"lang": "de"})
    assert job.options["retry"] == "patient"
    await report.enqueue(app, "en")
    await app.drain()
    assert sorted(seen, key=str) == [
        ("de", "report-de", fired.tick, {"trace": "x"}),
        ("en", None, None, {}),
    ]


async def test_a_clock_that_dies_before_its_commit_has_fired_nothing(dsn: str, db: Any) -> None:
    """S2-03 S2-05: fire, job and next tick are one transaction: a clock that dies with it leaves nothing, another one fires."""
    put(db, "s", at=NOON)
    async with clocks(dsn, None) as (clock,):
        await clock.run(at=NOON + SECOND)
        dying = await psycopg.AsyncConnection.connect(dsn)
        await dying.execute("select")
        left, ran = await clock._batch(dying, NOON + STEP)
        assert (left, ran.fired) == (False, 1)  # in a transaction that is still open
        assert fires(db) == []
        assert (await clock.run(at=NOON + STEP)).carried == 0  # it is locked: nobody waits
        await dying.close()
        await eventually(
            lambda: one(db, "select count(*) from pg_locks where locktype = 'advisory'") == 0, "it is gone"
        )
        assert (await clock.run(at=NOON + STEP)).fired == 1
    assert fires(db) == ["enqueued"]
    assert one(db, "select count(*) from tallybook.job") == 1


async def test_a_clock_that_is_frozen_stops_nobody(dsn: str, db: Any) -> None:
    """S2-03: who holds the claim of the clock's run and does nothing more delays the others by a second, not for ever."""
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
    """S2-02 S2-06: the next tick is skipped while the job is in line, runs, or is in backoff: no error, no job, on record."""
    put(db, "s", at=NOON)
    hands = Hands(db)
    await run(dsn, NOON + STEP)
    assert fires(db) == ["enqueued"]
    await run(dsn, NOON + 2 * STEP)  # in line
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
    """S2-05: after any end of the job, a worker that died and a dead letter included, the next tick fires."""
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
                hands.say("cancelled", job)
            case "rescued":
                hands.rescued()
                await run(dsn, NOON + 2 * STEP)
                assert fires(db) == ["enqueued", "skipped"]  # it is in line again
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
    """S2-06: with overlap a tick is fired whether or not the last one's job goes on."""
    put(db, "s", at=NOON, overlap=True)
    await run(dsn, NOON + STEP, NOON + 2 * STEP, NOON + 3 * STEP)
    assert fires(db) == ["enqueued"] * 3


async def test_a_rolled_back_fire_leaves_nothing(dsn: str, db: Any, connect: Any) -> None:
    """S2-03: the guard is rows beside the jobs: where the transaction fails, neither the fire nor the job is there."""
    put(db, "s", at=NOON)
    with pytest.raises(ZeroDivisionError), connect(autocommit=False) as conn:
        assert one(conn, "select what from tallybook.schedule_run('s')") == "enqueued"
        raise ZeroDivisionError
    assert fires(db) == [] and one(db, "select count(*) from tallybook.job") == 0
    assert one(db, "select what from tallybook.schedule_run('s')") == "enqueued"


# Run now


async def test_run_now_takes_the_same_path(dsn: str, db: Any) -> None:
    """S2-13: run now puts in a job with retries, is on record, and its guard holds for ticks and the next run now."""
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
    """S2-13 S2-02: run now that meets a fire's open transaction waits for its end, and is skipped by the job that it put in."""
    put(db, "s", at=NOON)
    await run(dsn, NOON + SECOND)
    with connect(autocommit=False) as firing:
        assert one(firing, "select what from tallybook.schedule_run('s')") == "enqueued"
        second = connect()
        waiting = asyncio.create_task(
            asyncio.to_thread(one, second, "select what, reason from tallybook.schedule_run('s')")
        )
        await eventually(lambda: one(db, "select count(*) from pg_locks where not granted") == 1, "it waits")
        firing.commit()
        assert await waiting == ("skipped", "overlap")


async def test_run_now_of_what_is_not_there(dsn: str, db: Any, connect: Any) -> None:
    """S2-13: an unknown schedule is UnknownSchedule, an old snapshot is refused; a paused one runs when a person says so."""
    app = App("shop", dsn=dsn)
    with pytest.raises(UnknownSchedule, match="there is no schedule"):
        app.schedule_run_sync(db, "s")
    put(db, "s", at=NOON)
    with connect(autocommit=False) as conn:
        conn.execute("set transaction isolation level repeatable read")
        with pytest.raises(WrongIsolationLevel):
            app.schedule_run_sync(conn, "s")
    app.schedule_pause_sync(db, "s")
    assert (await app.schedule_run(app, "s")).what == "enqueued"
    assert (await app.schedule_run(app, "s")).reason == "overlap"


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
    """S2-16: after an hour without a clock: the latest tick, none, or the latest three; the others are one row with how many."""
    put(db, "s", at=NOON, missed=missed, catch_up=3, overlap=True)
    await run(dsn, NOON + SECOND, NOON + 65 * MINUTE)
    assert fires(db, "s", "what", "ticks") == what
    assert one(db, "select missed_count, tick from tallybook.schedule") == (what[0][1], NOON + 70 * MINUTE)


async def test_catching_up_goes_one_by_one(dsn: str, db: Any) -> None:
    """S2-02: caught-up ticks run one after the other, behind a job that still runs; then ticks skip as ever."""
    put(db, "s", at=NOON, missed="all", catch_up=3)
    hands = Hands(db)
    await run(dsn, NOON + STEP)
    (first,) = hands.start()  # and the clocks are away for half an hour
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
    """S2-02: while any of several caught-up jobs is open the next tick is skipped, also where the last of them was cancelled."""
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
    """S2-02: a job that was put in before missed ticks were to be caught up stands in no line: while it runs they are skipped."""
    put(db, "s", at=NOON)
    await run(dsn, NOON + STEP)
    put(db, "s", at=NOON + STEP, missed="all")
    await run(dsn, NOON + 25 * MINUTE, NOON + 35 * MINUTE)
    assert fires(db) == ["enqueued", "skipped", "skipped"]


async def test_nothing_is_missed_in_a_pause(dsn: str, db: Any) -> None:
    """S2-16: a paused schedule does not fire; when it is resumed it fires from its next tick on, and the pause was no downtime."""
    put(db, "s", at=NOON)
    assert one(db, "select tallybook.schedule_pause('s', 'ada', %s)", NOON)
    assert not one(db, "select tallybook.schedule_pause('s', 'eve', %s)", NOON)
    assert one(db, "select paused_by from tallybook.schedule") == "ada"
    await run(dsn, NOON + STEP, NOON + 2 * STEP)
    assert one(db, "select tallybook.schedule_resume('s', %s)", NOON + 25 * MINUTE)
    assert not one(db, "select tallybook.schedule_resume('s', %s)", NOON)
    await run(dsn, NOON + 25 * MINUTE, NOON + 3 * STEP)
    assert fires(db, "s", "tick", "what") == [(NOON + 3 * STEP, "enqueued")]


# Schedules in code


async def test_schedules_in_code_are_registered(dsn: str, db: Any) -> None:
    """S2-11: at a worker's start they are put on record, changed in place, and go when they have left the code; a pause stays."""
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
        assert one(db, "select tick from tallybook.schedule where name = 'b'") == NOON + 5 * MINUTE  # not planned anew
        await third.run(at=NOON + 2 * MINUTE)
        assert db.execute(declared).fetchall() == []


async def test_the_same_release_again_writes_nothing(dsn: str, db: Any) -> None:
    """S2-11: a worker that starts with what is on record already writes no row, and waits for nobody who holds one."""
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
    """S2-11: a person's open transaction that holds the row does not stop a worker's start: it is said again a little later."""
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
    """S2-11: a changed expression fires at its own ticks only, from the change on; changed args keep the next tick."""
    put(db, "s", cron="0 * * * *", at=NOON, overlap=True)
    await run(dsn, NOON, NOON + 60 * MINUTE)
    assert put(db, "s", cron="15 * * * *", at=NOON + 70 * MINUTE, overlap=True) == "changed"
    assert put(db, "s", cron="15 * * * *", at=NOON + 71 * MINUTE, overlap=True) == "unchanged"
    assert put(db, "s", cron="15 * * * *", at=NOON + 72 * MINUTE, overlap=True, priority=1) == "changed"
    await run(dsn, *(NOON + n * MINUTE for n in range(70, 200, 1)))
    assert fires(db, "s", "tick") == [NOON + n * MINUTE for n in (60, 75, 135, 195)]


async def test_a_name_has_one_owner(dsn: str, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S2-11: a schedule of the database is not overwritten by code, nor that of another app, and code's not by the database."""
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
        app.schedule_put_sync(db, "mine", app.tasks["t"].job(), every="5 min")


# What goes wrong


async def test_an_expression_that_cannot_be_read_stops_no_other(
    dsn: str, db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-16: SQL can put what no worker can read: it says so on record and in the log, is tried again, and the others fire."""
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
    """S2-16: a row that somebody has broken by hand is on record as failed, with the reason, tick for tick; the others fire."""
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
        ({"cron": "@daily", "every": "5 min"}, "has a cron expression or an interval"),
        ({"cron": "every 5 min"}, "a cron expression has 5 fields"),
        ({"every": "1 month"}, "out of range"),
        ({"every": "0"}, "out of range"),
        ({"tz": "Mars/Base", "cron": "@daily"}, "time zone .* is not known"),
        ({"jitter": "-1 s"}, "jitter"),
        ({"missed": "twice"}, "missed"),
        ({"catch_up": 0}, "catch_up"),
        ({"queue": ""}, "a queue has 1 to 64 bytes"),
        ({"task": "a\nb"}, "control characters"),
        ({"name": ""}, "a schedule name"),
        ({"priority": -1}, "priority"),
        ({"args": "[]"}, "args are one JSON object"),
    ],
)
async def test_sql_refuses_what_cannot_tick(db: Any, more: dict[str, Any], words: str) -> None:
    """S2-11: schedule_put refuses with TB005, by name, what no job could be made of."""
    with pytest.raises(psycopg.Error, match=words) as error:
        put(db, **{"name": "s", "at": NOON, **more})
    assert error.value.sqlstate == "TB005"


# Workers


@pytest.mark.direct("kills processes that hold sessions")
def test_workers_that_are_killed_leave_no_gap(dsn: str, db: Any) -> None:
    """S2-04, S2-05: of three processes one after the other is killed and another started: each second of five schedules fires once,
    and every job completes.
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


async def test_workers_fire_to_the_moment(dsn: str, db: Any) -> None:
    """S2-01 S2-04: two workers fire each second of a schedule once, within a moment, and run it, beside what users enqueue."""
    app = App("shop", dsn=dsn)
    seen: list[Any] = []

    @app.task(schedule="* * * * * *", tz="Europe/Berlin")
    async def sweep(ctx: Context) -> None:
        seen.append((ctx.tick, datetime.now(UTC)))

    async with working(app, dsn), working(app, dsn):
        await eventually(lambda: len({tick for tick, _ in seen}) >= 3, "three ticks")
    ticks = [tick for tick, _ in seen]
    assert len(ticks) == len(set(ticks))
    assert sorted(ticks) == [min(ticks) + n * SECOND for n in range(len(ticks))]
    assert all(at >= tick for tick, at in seen)
    assert set(fires(db)) == {"enqueued"}


@pytest.mark.direct("is told by a notification")
async def test_a_worker_is_told_of_a_new_schedule(dsn: str, db: Any) -> None:
    """S2-01: a schedule that is put while workers sleep is planned at once, not at their next look."""
    db.execute("update tallybook.service set every = '1 hour' where name = 'schedules'")
    app = App("shop", dsn=dsn)
    async with working(app, dsn, **SLEEPY) as worker:
        assert worker.sleeper is not None
        await eventually(lambda: worker.sleeper.clear, "it sleeps")
        await eventually(
            lambda: one(db, "select last_run_at is not null from tallybook.service where name = 'schedules'"), "a look"
        )
        app.schedule_put_sync(db, "s", app.task(name="t")(_nothing).job(), every="1 s")
        await eventually(lambda: fires(db, "s"), "its first fire", seconds=8)


async def _nothing() -> None: ...


async def test_drain_fires_what_is_due(dsn: str, db: Any) -> None:
    """S4-07: drain registers the app's schedules and fires what is due before it runs the jobs; where none is due it fires none."""
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
    """S2-11: what can only be known when annotations are read stops the worker's start, with a clear error."""
    app = App("shop", dsn=dsn)

    @app.task(schedule="@daily")
    async def report(lang: str) -> None: ...

    with pytest.raises(ConfigError, match=r"app\.schedule\('report'"):
        await app.drain()


async def test_what_the_app_tells_of_its_schedules(dsn: str, db: Any) -> None:
    """S2-16: list, next ticks and fires with the states of their jobs, in Python; both forms of each verb."""
    app = App("shop", dsn=dsn)

    @app.task(queue="q")
    async def t(n: int) -> None: ...

    assert await app.schedule_put(app, "s", t.job(1), cron="0 6 * * *", tz="Europe/Berlin", jitter="5 min") == "created"
    assert app.schedule_put_sync(db, "s", t.job(1), cron="0 6 * * *", tz="Europe/Berlin", jitter="5 min") == "unchanged"
    (found,) = await app.schedule_list(app)
    assert (found.rule, found.jitter, found.source, found.args) == (
        "0 6 * * * Europe/Berlin",
        5 * MINUTE,
        "database",
        {"n": 1},
    )
    ticks = await app.schedule_next(app, "s", 3)
    assert [b - a for a, b in pairwise(ticks)][-1] in (timedelta(hours=n) for n in (23, 24, 25))
    assert ticks == app.schedule_next_sync(db, "s", 3)
    await app.schedule_run(app, "s")
    await app.schedule_run(app, "s")
    told = [(fire.what, fire.reason, fire.job_state) for fire in await app.schedule_fires(app, "s")]
    assert told == [("skipped", "overlap", None), ("enqueued", None, "available")]
    await Jobs(app, db).app.drain()
    assert [fire.job_state for fire in app.schedule_fires_sync(db, "s", max_fires=2)] == [None, "completed"]
    (found,) = app.schedule_list_sync(db)
    assert (found.fired_count, found.skipped_count, found.last_what) == (1, 1, "skipped")
    assert await app.schedule_pause(app, "s") is True and app.schedule_pause_sync(db, "s") is False
    assert app.schedule_resume_sync(db, "s") is True and await app.schedule_resume(app, "s") is False
    assert await app.schedule_drop(app, "s") is True and app.schedule_drop_sync(db, "s") is False
    with pytest.raises(UnknownSchedule):
        await app.schedule_next(app, "s")
