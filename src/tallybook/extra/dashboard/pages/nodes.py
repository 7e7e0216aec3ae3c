"""Nodes: for each whether it answers, the age of its figures, its jobs and its lag."""

from __future__ import annotations

from contextlib import suppress

from starlette.responses import Response

from tallybook.errors import QueueUnavailable
from tallybook.extra.dashboard.nodes import At
from tallybook.extra.dashboard.readings import STATES
from tallybook.extra.dashboard.render import moment
from tallybook.extra.dashboard.shared import Shared
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()


def topics(site: Shared) -> None:
    async def fragment(_: str) -> str:
        return site.fragment("nodes_live.html", nodes=await _standing(site))

    site.live.over("nodes", fragment)


async def _standing(site: Shared) -> list[dict[str, object]]:
    """Return the rows of all nodes, also of those that have never answered."""
    with suppress(QueueUnavailable):  # no node answers: the page shows this for each
        await site.overview.read()
    return [_node(site, at) for at in await site.nodes.known()]


def _node(site: Shared, at: At) -> dict[str, object]:
    last, age = site.overview.last.get(at.name), site.overview.age(at.name)
    sums = dict.fromkeys(STATES, 0)
    queues = last.reading.queues.values() if last else ()
    for queue in queues:
        sums = {state: n + (queue[state] or 0) for state, n in sums.items()}
    oldest = [since for queue in queues if (since := moment(queue["oldest"])) is not None]
    lags = [worker["lag"] for worker in last.reading.workers if worker["lag"] is not None] if last else []
    return {
        "oldest": min(oldest, default=None), "lag": max(lags, default=None),
        "node": at.node, "away": at.away, "age": age, "known": last is not None,
        "open": sum(sums.values()) - sums["dead"], "running": sums["running"], "dead": sums["dead"],
        "workers": last.reading.alive if last else 0,
    }  # fmt: skip


@pages.page("/nodes")
async def nodes(view: View) -> Response:
    return view.render("nodes.html", nodes=await _standing(view.site))
