"""Clocks in a test's own event loop, with times that the test sets, and a worker in SQL that ends their jobs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from support.database import Connection, call
from tallybook import App
from tallybook._db.link import Link
from tallybook._maintenance.clock import Clock

NOON = datetime(2031, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)
STEP = timedelta(minutes=10)


@asynccontextmanager
async def clocks(dsn: str, *apps: App | None) -> AsyncIterator[list[Clock]]:
    """Yield one clock per app, each with its own connections; None is an app without declared schedules."""
    made = []
    for app in apps:
        links = Link(dsn, "clock"), Link(dsn, "clock")
        made.append(Clock(*links, app=app.name, declared=app._declared_schedules) if app else Clock(*links))
    try:
        yield made
    finally:
        for clock in made:
            await clock._link.close()
            await clock.queries.close()


def fires(db: Connection, name: str | None = None, *columns: str) -> list[Any]:
    """Return the results of the ticks in order: these columns, or only `what`."""
    wanted = ", ".join(columns or ("what",))
    where = "" if name is None else "where schedule = %(name)s"
    query = f"select {wanted} from tallybook.fire {where} order by tick, schedule"  # noqa: S608
    rows = db.execute(query, {"name": name}).fetchall()  # type: ignore[arg-type]
    return [row[0] if len(row) == 1 else row for row in rows]


def put(db: Connection, name: str, *, at: datetime | str, **more: Any) -> str:
    """Call schedule_set at an instant, by default with a task in queue q and every 10 minutes."""
    more = {"name": name, "task": "t", "queue": "q", "at": at, **more}
    if not {"cron", "every"} & set(more):
        more["every"] = "10 min"
    ((what,),) = call(db, "schedule_set", **more)
    return what


def declaring(**schedules: dict[str, Any]) -> App:
    """Return an app with one task and these schedules of it."""
    app = App("shop")

    @app.task(queue="q")
    async def t(n: int = 0) -> None: ...

    for name, timing in schedules.items():
        args = timing.pop("args", ())
        app.schedule(name.replace("_", "-"), t.job(*args), **timing)
    return app


async def run(dsn: str, *instants: datetime) -> None:
    """Run one clock at these instants."""
    async with clocks(dsn, None) as (clock,):
        for at in instants:
            await clock.run(at=at)


def one(db: Connection, query: Any, *params: object) -> Any:
    """Return the only column of the only row, or the row if it has several columns."""
    row = db.execute(query, params).fetchone()
    assert row is not None
    return row[0] if len(row) == 1 else row
