"""The clock: fires the schedules that are due, in whichever worker comes first.

Cron expressions are evaluated in Python, so a worker computes the next ticks. SQL decides which worker fires them, by
the row of `fire`. A run is one transaction: claim it, read what is due, compute, store everything in one statement.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime, timedelta
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.link import Link, aside
from tallybook._maintenance.queries import Queries
from tallybook._maintenance.service import Service, happens
from tallybook._model.cron import rule
from tallybook._model.schedule import Plan, plan
from tallybook.errors import ConfigError

log = logging.getLogger("tallybook.worker")

_NOW = "coalesce({at}, clock_timestamp())"
_REGISTER = Declared("""
  _schedules_register(p_app text, p_schedules jsonb, p_at timestamptz)
  -> rows (schedule_name what detail text)""", p_at=_NOW)  # fmt: skip
_LOOK = Declared(
    "_schedules_look(p_after timestamptz) -> row (due_in float8, queries_due boolean, queries_in every float8)"
)
_DUE = Declared("""
  _schedules_due(p_max int, p_after timestamptz, p_queries boolean, p_at timestamptz)
  -> rows (at upto timestamptz, name revision cron text, every bigint, tz text, jitter bigint, missed text,
           catch_up int, since tick timestamptz)""", p_at=_NOW)  # fmt: skip
_FIRE = Declared("_schedules_fire(p_plans jsonb, p_at timestamptz) -> row (carried fired skipped missed failed int)")
_BATCH = 250
# Seconds that one batch may compute: after a long outage each schedule has many ticks to count, and other work waits.
_COMPUTING = 0.2
_WATCHED = 60.0  # seconds for which the clock relies on the services' own checks, once these report to it
# Seconds to wait while another worker runs the clock or holds a row: by then it has fired what is due, or is slow.
_BUSY, _LONGEST_BUSY = 0.05, 1.0
_AGAIN = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Ran:
    carried: int = 0  # schedules that were due and now have a later tick
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    failed: int = 0

    def __add__(self, other: Ran) -> Ran:
        return Ran(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Clock:
    """`look` returns when the next run is due, `run` runs once, and `serve` does both forever.

    Schedules whose jobs come from a query fire beside the others, on links like `queries`: a slow query delays none.
    """

    def __init__(
        self,
        link: Link,
        queries: Link,
        *,
        app: str = "",
        declared: Callable[[], Sequence[dict[str, Any]] | None] | None = None,
        on_fired: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._told = asyncio.Event()
        self.queries = Queries(queries, on_fired=on_fired, on_end=self._told.set)
        self._app = app
        self._declared = declared
        self._on_fired = on_fired
        self._every = 5.0
        self._after: datetime | None = None
        self._looked_behind = self._register_at = -math.inf
        self._queries_due = False
        self._warned: set[tuple[str, str]] = set()
        self.watched_at = -math.inf  # when the services' check, which wakes the clock, covered schedules, too

    def declare(self, declared: Callable[[], Sequence[dict[str, Any]] | None]) -> None:
        """Store these schedules of the app's code from now on, and no others; None: they are for another node."""
        self._declared, self._register_at = declared, -math.inf
        self._told.set()

    def changed(self) -> None:
        """Check now: a schedule was created, changed or resumed."""
        self._looked_behind = -math.inf  # its commit may have been late
        self._told.set()

    async def register(self, *, at: datetime | None = None) -> None:
        """Store the schedules of the app's code, unless that is done. Retry locked ones later."""
        if self._declared is None or time.monotonic() < self._register_at:
            return
        declared = self._declared
        found = declared()
        said = None if found is None else json.dumps(found)
        busy = False
        for name, what, detail in await self._link.rows(_REGISTER.worker, self._app, said, at):
            busy |= what == "busy"
            if what in ("created", "changed", "removed"):
                log.info("schedule %r of app %r is %s", name, self._app, what, extra={"event": f"schedule {what}"})
            elif what != "busy":
                self._warn(name, _refusal(self._app, what, detail))
        if self._declared is not declared:  # `declare` was called meanwhile
            return
        self._register_at = time.monotonic() + self._every
        if not busy:
            self._declared = None

    async def look(self) -> float:
        """Check once; return the seconds until the next run or check."""
        now = time.monotonic()
        if now - self._looked_behind > self._every:
            self._after, self._looked_behind = None, now
        ((due_in, self._queries_due, queries_in, self._every),) = await self._link.rows(_LOOK.worker, self._after)
        if self._declared is not None and now >= self._register_at:
            return 0.0
        alone = now - self.watched_at > 2 * self._every
        longest = (self._every if alone else _WATCHED) * random.uniform(0.75, 1.0)
        return float(min(wait for wait in (longest, due_in, queries_in) if wait is not None))

    async def run(self, *, at: datetime | None = None) -> Ran:
        """Fire what is due, and store the app's schedules unless that is done. `at`: for tests."""
        total = await self._fire(at)
        if self._declared is not None:  # only after the due ticks of the schedules stored so far
            await self.register(at=at)
            total += await self._fire(at)
        return total

    async def _fire(self, at: datetime | None) -> Ran:
        """Fire batch after batch, until nothing is left or another worker is firing."""
        total = Ran()
        while True:
            left, ran = await self._link.run(lambda conn: self._batch(conn, at))
            total += ran
            if ran.fired:
                self._on_fired()
            if not left or not ran.carried:
                return total

    async def _batch(self, conn: AsyncConnection, at: datetime | None) -> tuple[bool, Ran]:
        """Run one transaction; return whether more may be due, and the counts."""
        async with conn.transaction():
            cursor = await conn.execute(_DUE.worker, (_BATCH, self._after if at is None else None, False, at))
            rows = await cursor.fetchall()
            if not rows:
                return False, Ran()
            plans = await aside(self._plans, rows)
            now = rows[0][0]
            row = await (await conn.execute(_FIRE.worker, (json.dumps(plans), now))).fetchone()
        assert row is not None
        ran = Ran(*row)
        left = len(rows) == _BATCH or len(plans) < len(rows)
        if at is None and not left and ran.carried == len(rows):
            self._after = rows[0][1]  # nothing before this can be due, except for late commits
        return left, ran

    async def start_queries(self, *, at: datetime | None = None) -> list[asyncio.Task[int]]:
        """Start firing the query-driven schedules that are due, as many as may run at the same time."""
        rows = {row[2]: row for row in await self._link.rows(_DUE.worker, _BATCH, None, True, at)}
        found = [rows[name] for name in self.queries.wanted(list(rows))]
        plans = await aside(self._plans, found)
        return [self.queries.start(one, row[0]) for one, row in zip(plans, found, strict=False)]

    async def run_queries(self, *, at: datetime | None = None) -> int:
        """Fire all query-driven schedules that are due; return how many jobs they enqueued."""
        jobs = 0
        while started := await self.start_queries(at=at):
            jobs += sum(await asyncio.gather(*started))
        return jobs

    def _plans(self, rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the plans of these schedules, computed in a thread; of fewer of them if it takes long."""
        until = time.monotonic() + _COMPUTING
        found = []
        for row in rows:
            found.append(self._plan(row))
            if time.monotonic() > until:
                break
        return found

    def _plan(self, row: Sequence[Any]) -> dict[str, Any]:
        at, _, name, revision, cron, every, tz, jitter, missed, catch_up, since, tick = row
        said: dict[str, Any] = {"name": name, "revision": revision, "tick": tick and tick.isoformat()}
        try:
            ticks = rule(cron, None if every is None else timedelta(microseconds=every), tz)
            length = timedelta(microseconds=jitter)
            first = tick or ticks.after(since)
            found = plan(name, ticks, first, at, jitter=length, missed=missed, catch_up=catch_up)
        except Exception as error:  # a schedule that cannot be computed must not stop the others
            if not isinstance(error, ConfigError):
                log.exception("schedule %r: its ticks cannot be computed", name)
            text = f"{type(error).__name__}: {error}"
            self._warn(name, f"its ticks cannot be computed, so it does not fire: {text}")
            return {**said, **Plan([]).columns(), "problem": text[:2000], "due": (at + _AGAIN).isoformat()}
        return {**said, **found.columns(), "problem": None if found.next else "it has no next tick within 50 years"}

    def _warn(self, name: str, text: str) -> None:
        if (name, text) not in self._warned:
            self._warned.add((name, text))
            log.warning("schedule %r: %s", name, text, extra={"event": "schedule problem"})

    async def serve(self) -> None:
        busy = _BUSY
        try:
            while True:
                self._told.clear()
                wait = await self.look()
                if self._queries_due:
                    await self.start_queries()
                if wait <= 0:
                    if (await self.run()).carried:
                        busy = _BUSY
                        continue
                    wait, busy = busy * random.uniform(0.5, 1.5), min(2 * busy, _LONGEST_BUSY)
                else:
                    busy = _BUSY
                await happens(self._told, max(wait, 0.001))
        finally:
            await self.queries.close()


def _refusal(app: str, what: str, detail: str | None) -> str:
    if what == "refused":
        return f"the server refuses the schedule that app {app!r} declares: {detail}"
    owner = "the database" if detail is None else f"app {detail!r}"
    return (
        f"app {app!r} declares it, and it belongs to {owner}, so it is not changed. Give it another name; or remove the"
        " old one with `tallybook schedule drop` and start a worker of this app again"
    )


class ClockWatch(Service):
    """The clock's part in the check of all services: wakes it when a schedule is due."""

    name = "schedules"

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(link)
        self._clock = clock

    def looked(self, due_in: float | None) -> None:
        """Note the result of the check: in how many seconds the next schedule is due."""
        self._clock.watched_at = time.monotonic()
        if due_in is not None:
            self.run_at = asyncio.get_running_loop().time() + max(0.0, due_in)

    async def serve(self) -> None:
        """Wake the clock, which claims its own run and does it beside the other services."""
        self._clock.changed()
