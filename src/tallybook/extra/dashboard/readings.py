"""How things stand, as the overview shows it: every viewer gets what one poller has read."""

from __future__ import annotations

import json
import time
from typing import Any

from tallybook._db import top
from tallybook._db.counting import COMPLETED
from tallybook._db.top import Reading
from tallybook.extra.dashboard.database import Conn

STATES = ("available", "running", "scheduled", "retrying", "waiting", "dead")
_MOST_QUEUES = 12
_SAME_LOOK = 0.5  # seconds; the two topics of a page are asked for one after the other
_RECENT = 10.0  # seconds
_TODAY_GOOD = 5.0  # seconds; it reads a day's series
_COMPLETED_TODAY = f"""\
select cast(coalesce(sum(c.completed), 0) as bigint)
  from {COMPLETED.called(since="date_trunc('day', clock_timestamp())")} as c"""  # noqa: S608


class Readings:
    """What the poller keeps from one reading to the next."""

    def __init__(self) -> None:
        self._before: Reading | None = None
        self._read_at = 0.0
        self._today, self._today_until = 0, 0.0

    async def read(self, conn: Conn) -> dict[str, Any]:
        now = await top.read_async(conn, self._before)
        rates = top.rates(self._recent(), now)
        self._before, self._read_at = now, time.monotonic()
        return standing(now, rates) | {"today": await self._completed_today(conn)}

    async def first(self, conn: Conn) -> dict[str, Any]:
        """For the first sight of the page. The poller's last reading stays, if it polls: rates are between two of its own."""
        before = self._recent()
        now = await top.read_async(conn, self._before)
        if before is None:
            self._before, self._read_at = now, time.monotonic()
        return standing(now, top.Rates()) | {"today": await self._completed_today(conn)}

    def _recent(self) -> Reading | None:
        """The last reading, unless nobody has looked for a while: nobody wants the rate of a night."""
        return self._before if time.monotonic() - self._read_at < _RECENT else None

    async def _completed_today(self, conn: Conn) -> int:
        if time.monotonic() > self._today_until:
            row = await (await conn.execute(_COMPLETED_TODAY)).fetchone()
            self._today, self._today_until = row[0] if row else 0, time.monotonic() + _TODAY_GOOD
        return self._today

    async def point(self, conn: Conn, _: str) -> str:
        """The newest point of the charts: time, completed and failed a second, in line, running."""
        found = self._before
        if found is None or time.monotonic() - self._read_at > _SAME_LOOK:
            found = self._before = await top.read_async(conn, self._before)
        sums = {
            state: sum(one[state] or 0 for one in found.queues.values()) for state in (*STATES, "completed", "failed")
        }
        return json.dumps({"at": found.now.timestamp(), **sums})


def standing(now: Reading, rates: top.Rates) -> dict[str, Any]:
    """A reading as the templates take it."""
    queues = sorted(
        now.queues.values(), key=lambda one: (-(one["available"] + one["running"] + one["dead"]), one["name"])
    )
    total = {state: sum(one[state] or 0 for one in queues) for state in (*STATES, "completed", "failed")}
    return {
        "now": now, "rates": rates, "total": total,
        "queues": queues[:_MOST_QUEUES], "more_queues": max(0, len(queues) - _MOST_QUEUES),
        "paused": [one["name"] for one in queues if one["paused_at"]], "silent": [one for one in now.workers if one["silent"]],
    }  # fmt: skip
