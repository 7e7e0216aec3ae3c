"""The current figures: for the overview, where one poller reads them for every viewer, and for machines.

Those are /metrics for Prometheus, /healthz and /readyz for probes.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tallybook._app.counts import COMPLETED, THROUGHPUT
from tallybook._db import top
from tallybook._db.numbers import CONTENT_TYPE, Asked, Numbers, Sample, Shown, ask, of_nodes, of_the_database, text
from tallybook._db.verb import run
from tallybook.errors import ConfigError, QueueUnavailable
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.nodes import At, Nodes, sorted_out

STATES = ("available", "running", "scheduled", "retrying", "waiting", "dead")
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
        self._newest: dict[str, tuple[float, dict[str, Any]]] = {}  # the last result of `read`, with its time

    async def read(self, only: str = "") -> dict[str, Any]:
        """Return the values for the overview. QueueUnavailable if no node has ever answered."""
        said = await self._nodes.ask(self._look, only)
        found = {one.name: one.value or self.last.get(one.name) for one in said}
        known = {name: look for name, look in found.items() if look is not None}
        if not known:
            raise QueueUnavailable(f"node {said[0].name}", said[0].error or "")
        now = top.merged({name: one.reading for name, one in known.items()}) if self._nodes.many else known[""].reading
        seen = [(at, one) for at in await self._nodes.chosen(only) for one in at.database.examination.last()]
        findings = [(at.name, one) for at, one in seen if at.away is None and not one.good and one.name not in _SHOWN]
        queues = sorted(now.queues.values(), key=lambda one: one["name"])
        queues.sort(key=lambda one: one["available"] + one["running"] + one["dead"], reverse=True)
        values = {
            "now": now, "rates": top.added([one.value.rates for one in said if one.value]), "findings": findings,
            "total": {state: sum(one[state] or 0 for one in queues) for state in STATES},
            "queues": queues, "today": sum(one.today for one in known.values()),
            "gone": [(one.name, one.error, self.age(one.name)) for one in said if one.error is not None],
        }  # fmt: skip
        self._newest[only] = time.monotonic(), values
        return values

    async def _look(self, conn: Conn, name: str) -> Look:
        last = self.last.get(name)
        now = await top.read_async(conn, None if last is None else last.reading)
        if last is not None and time.monotonic() <= last.good_until:
            self.last[name] = found = replace(last, reading=now, at=time.monotonic())
            return found
        row = await (await conn.execute(_COMPLETED_TODAY)).fetchone()
        ended = await run(conn, THROUGHPUT("1 min"))
        found = Look(now, top.flow(ended), row[0] if row else 0, time.monotonic() + _FLOW_GOOD, time.monotonic())
        self.last[name] = found
        return found

    def age(self, name: str) -> float | None:
        """Return the age of a node's figures in seconds; None if there are none."""
        found = self.last.get(name)
        return None if found is None else time.monotonic() - found.at

    async def point(self, only: str = "") -> str:
        """Return the newest point of the charts and the counts of the side bar, as JSON."""
        at, found = self._newest.get(only, (float("-inf"), {}))
        if time.monotonic() - at >= _SAME_LOOK:
            found = await self.read(only)
        now, total, rates = found["now"], found["total"], found["rates"]
        sums = total | {"open": total["available"] + total["running"], "queues": len(found["queues"])}
        sums |= {"workers": now.alive, "completed": rates.completed, "failed": rates.failed}
        return json.dumps({"at": now.now.timestamp(), **sums})


_FEWEST = 16
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_READY = "select to_regclass('tallybook.entry') is not null"


def metrics_route(nodes: Nodes, *, token: str | None = None, admits: Callable[[Request], bool] | None = None) -> Route:
    """Return a route with the metrics of the database, as in a worker's /metrics. They are read at most once a second.

    A request needs `Authorization: Bearer TOKEN`, or must be accepted by `admits`; others get a 401. With neither of
    the two, every request is served. An unreachable database is `tallybook_up 0` with a 200; with several nodes, each
    has its own. ConfigError if the token has fewer than 16 characters, or characters that a header cannot carry.
    """
    if token is not None and (not isinstance(token, str) or len(token) < _FEWEST):
        hint = 'Make one with python -c "import secrets; print(secrets.token_urlsafe(32))"'
        raise ConfigError("token", "(not shown)", f"must have at least {_FEWEST} characters", hint=hint)
    if token is not None and (not (token.isascii() and token.isprintable()) or " " in token):
        raise ConfigError("token", "(not shown)", "has characters that a header cannot carry")
    asked: dict[str, tuple[Asked[Numbers], Shown]] = {}

    async def numbers(at: At) -> dict[str, list[Sample]]:
        async def answer() -> Numbers:
            return sorted_out([await nodes.ask_one(at, lambda conn, _: ask(conn))])[0][at.name]

        one, shown = asked.setdefault(at.name, (Asked(answer), Shown()))
        found, standby = of_the_database(await one.now(), shown), at.database.standby
        if standby is not None and standby.lag is not None:
            found["tallybook_standby_lag_seconds"] = [((), standby.lag)]
        return found

    async def metrics(request: Request) -> Response:
        is_known = knows_token(request, token) or (admits is not None and admits(request))
        if not is_known and (token is not None or admits is not None):
            headers = {**_HEADERS, "WWW-Authenticate": 'Bearer realm="tallybook"'}
            return PlainTextResponse("a bearer token is required\n", 401, headers)
        known = await nodes.known()
        found = dict(zip((at.name for at in known), await asyncio.gather(*map(numbers, known)), strict=True))
        whole = of_nodes(found) if nodes.many else found[""]
        return Response(text(whole), headers={**_HEADERS, "Content-Type": CONTENT_TYPE})

    return Route("/metrics", metrics, methods=["GET"], name="metrics")


def health_routes(nodes: Nodes) -> list[Route]:
    """Return the routes of the probes, which show nothing secret and need no authentication.

    `/healthz` is 200 while the process answers. `/readyz` is 200 while the database, or one of several nodes, answers
    and has Tallybook installed, otherwise 503. It reads the database at most once a second.
    """

    async def answer() -> bool:
        async def ready(conn: Conn, _: str) -> bool:
            row = await (await conn.execute(_READY)).fetchone()
            return bool(row and row[0])

        return any((await nodes.answered(ready))[0].values())

    asked = Asked(answer)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_HEADERS)

    async def readyz(request: Request) -> Response:
        if found := await asked.now():
            return await healthz(request)
        why = "no connection to the database" if found is None else "Tallybook is not installed in the database"
        return PlainTextResponse(f"{why}\n", 503, _HEADERS)

    return [Route(f"/{one.__name__}", one, methods=["GET"], name=one.__name__) for one in (healthz, readyz)]


def knows_token(request: Request, token: str | None) -> bool:
    """Return whether the request has this bearer token, in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())
