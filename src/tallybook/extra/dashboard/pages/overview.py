"""Overview: the current figures, live; one poller reads them for every viewer. And the nodes with their figures."""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from starlette.responses import JSONResponse, Response

from tallybook._db import top
from tallybook._model.counting import Level, added
from tallybook.errors import QueueUnavailable
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.metrics import STATES
from tallybook.extra.dashboard.texts import moment
from tallybook.extra.dashboard.view import Pages, Shared, View

pages = Pages()
_SPANS = {
    "15m": ("15 min", 900, 60),
    "3h": ("3 h", 10_800, 300),
    "1d": ("1 d", 86_400, 1800),
    "7d": ("7 d", 604_800, 14_400),
}


def topics(site: Shared) -> None:
    async def fragment(only: str) -> str:
        return site.fragment("overview_live.html", only, **await site.overview.read(only))

    site.live.over("overview", fragment)

    async def of_nodes(_: str) -> str:
        return site.fragment("nodes_live.html", nodes=await _standing(site))

    site.live.over("point", site.overview.point)
    if site.nodes.many:
        site.live.over("nodes", of_nodes)


def spans_of(view: View) -> dict[str, Any]:
    """Return the values for the charts of a page: all spans and the chosen span of each chart."""
    chosen = {kind: view.asked(kind) for kind in ("flow", "level")}
    return {"spans": _SPANS, "chosen": {kind: key if key in _SPANS else "15m" for kind, key in chosen.items()}}


@pages.page("/")
async def overview(view: View) -> Response:
    return view.render("overview.html", **spans_of(view), **await view.site.overview.read(view.asked("node")))


@pages.page("/series")
async def series(view: View) -> Response:
    """Return the points of the charts as columns: time, completed and failed per second, open jobs, waiting jobs, ...

    A point has the time at the end of its step. The last point is the current one, with the rates of the last minute.
    """
    _, seconds, step = _SPANS.get(view.asked("span"), _SPANS["15m"])
    queue = view.asked("queue") or None

    async def read(conn: Conn, _: str) -> tuple[list[Level], top.Rates]:
        every, since = timedelta(seconds=step), timedelta(seconds=seconds)
        ended = await view.app.counts.throughput().on(conn)
        rates = top.flow([one for one in ended if queue in (None, one.queue)])
        return await view.app.counts.levels(step=every, since=since, queue=queue).on(conn), rates

    found = (await view.ask(read)).values()
    levels, now = added([one for one, _ in found]), top.added([rates for _, rates in found])
    return JSONResponse({
        "at": [one.begins.timestamp() + step for one in levels[:-1]] + [time.time()],
        "completed": [one.completed / step for one in levels[:-1]] + [now.completed],
        "failed": [one.failed / step for one in levels[:-1]] + [now.failed],
        **{name: [getattr(one, name) for one in levels]
           for name in ("open", "waiting", "scheduled", "retrying", "dead")},
    })  # fmt: skip


async def _standing(site: Shared) -> list[dict[str, object]]:
    """Return the rows of all nodes, also of those that have never answered."""
    with suppress(QueueUnavailable):  # no node answers: the page shows this for each
        await site.overview.read()
    found = []
    for at in await site.nodes.known():
        last = site.overview.last.get(at.name)
        queues = last.reading.queues.values() if last else ()
        sums = {state: sum(queue[state] or 0 for queue in queues) for state in STATES}
        oldest = [since for queue in queues if (since := moment(queue["oldest"])) is not None]
        lags = [worker["lag"] for worker in last.reading.workers if worker["lag"] is not None] if last else []
        found.append({
            "oldest": min(oldest, default=None), "lag": max(lags, default=None), "age": site.overview.age(at.name),
            "node": at.node, "away": at.away, "known": last is not None, "workers": last.reading.alive if last else 0,
            "open": sum(sums.values()) - sums["dead"], "running": sums["running"], "dead": sums["dead"],
        })  # fmt: skip
    return found


@pages.page("/nodes")
async def nodes(view: View) -> Response:
    return view.render("nodes.html", nodes=await _standing(view.site))
