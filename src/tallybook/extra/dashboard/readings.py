"""The current figures for the overview. One poller reads them for every viewer."""

import json
import time
from dataclasses import dataclass, replace
from typing import Any

from tallybook._db import top
from tallybook._db.counting import COMPLETED, throughput
from tallybook._db.verb import run
from tallybook.errors import QueueUnavailable
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.nodes import Nodes

STATES = ("available", "running", "scheduled", "retrying", "waiting", "dead")
_MOST_QUEUES = 12
_SAME_LOOK = 0.5  # seconds; the two topics of a page share one reading
_FLOW_GOOD = 5.0  # seconds; it reads the series of a day
_SHOWN = ("paused", "workers", "horizon")
"""Checks of the doctor that the overview makes on its own, without delay."""
_COMPLETED_TODAY = f"""\
select cast(coalesce(sum(c.completed), 0) as bigint)
  from {COMPLETED.called(since="date_trunc('day', clock_timestamp())")} as c"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Look:
    reading: top.Reading
    rates: top.Rates
    today: int  # jobs that completed today
    good_until: float  # when to read `rates` and `today` again; this and `at`, the time of the reading, are monotonic
    at: float


class Readings:
    """The figures of all nodes, or of the one database. Those of a node that is away stay, with their age."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.last: dict[str, Look] = {}  # of each node

    async def read(self, only: str = "") -> dict[str, Any]:
        """Return the values for the overview. QueueUnavailable if no node has ever answered."""
        said = await self._nodes.ask(self._look, only)
        found = {one.name: one.value or self.last.get(one.name) for one in said}
        known = {name: look for name, look in found.items() if look is not None}
        if not known:
            raise QueueUnavailable(f"node {said[0].name}", said[0].error or "")
        now = top.merged({name: one.reading for name, one in known.items()}) if self._nodes.many else known[""].reading
        rates = top.added([one.value.rates for one in said if one.value]) if self._nodes.many else known[""].rates
        seen = [(at, one) for at in await self._nodes.chosen(only) for one in at.database.examination.last()]
        findings = [(at.name, one) for at, one in seen if at.away is None and not one.good and one.name not in _SHOWN]
        gone = [(one.name, one.error, self.age(one.name)) for one in said if one.error is not None]
        today = sum(one.today for one in known.values())
        return standing(now, rates) | {"today": today, "findings": findings, "gone": gone}

    async def _look(self, conn: Conn, name: str) -> Look:
        last = self.last.get(name)
        now = await top.read_async(conn, None if last is None else last.reading)
        if last is not None and time.monotonic() <= last.good_until:
            self.last[name] = found = replace(last, reading=now, at=time.monotonic())
            return found
        row = await (await conn.execute(_COMPLETED_TODAY)).fetchone()
        ended = await run(conn, throughput("1 min"))
        found = Look(now, top.flow(ended), row[0] if row else 0, time.monotonic() + _FLOW_GOOD, time.monotonic())
        self.last[name] = found
        return found

    def age(self, name: str) -> float | None:
        """Return the age of a node's figures in seconds; None if there are none."""
        found = self.last.get(name)
        return None if found is None else time.monotonic() - found.at

    async def point(self, only: str = "") -> str:
        """Return the newest point of the charts and the counts of the side bar, as JSON."""
        names = [at.name for at in await self._nodes.chosen(only)]
        if all((age := self.age(name)) is None or age >= _SAME_LOOK for name in names):
            await self.read(only)
        found = [one for name in names if (one := self.last.get(name))]
        queues = [queue for one in found for queue in one.reading.queues.values()]
        sums = {state: sum(one[state] or 0 for one in queues) for state in STATES}
        rates = top.added([one.rates for one in found])
        at = max(one.reading.now.timestamp() for one in found)
        sums |= {"open": sums["available"] + sums["running"], "queues": len({one["name"] for one in queues})}
        sums["workers"] = sum(one.reading.alive for one in found)
        return json.dumps({"at": at, "completed": rates.completed, "failed": rates.failed, **sums})


def standing(now: top.Reading, rates: top.Rates) -> dict[str, Any]:
    queues = sorted(now.queues.values(), key=lambda one: one["name"])
    queues.sort(key=lambda one: one["available"] + one["running"] + one["dead"], reverse=True)
    total = {state: sum(one[state] or 0 for one in queues) for state in STATES}
    return {
        "now": now, "rates": rates, "total": total,
        "queues": queues[:_MOST_QUEUES], "more_queues": max(0, len(queues) - _MOST_QUEUES),
        "paused": [(one["name"], one.get("node")) for one in queues if one["paused_at"]],
        "silent": [one for one in now.workers if one["silent"]],
    }  # fmt: skip
