"""Weeks of virtual time across changes of the UTC offset, while clocks start and die and the app is upgraded."""

import random
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
import pytest
from cronsim import CronSim

from support.hands import Hands
from support.ticking import clocks, fires, one, put
from tallybook import App
from tallybook._db.link import Link
from tallybook._maintenance.clock import Clock

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
                await _dies(dsn, running[0], at)
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


async def _dies(dsn: str, clock: Clock, at: datetime) -> None:
    """Let a clock fire what is due and die before its transaction has committed."""
    async with await psycopg.AsyncConnection.connect(dsn) as dying:
        await dying.execute("select")
        await clock._batch(dying, at)
        await dying.rollback()
