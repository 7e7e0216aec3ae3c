"""Nodes: for each whether it answers, the age of its figures, its jobs and its lag."""

from contextlib import suppress

from starlette.responses import Response

from tallybook.errors import QueueUnavailable
from tallybook.extra.dashboard.readings import STATES
from tallybook.extra.dashboard.render import moment
from tallybook.extra.dashboard.view import Pages, Shared, View

pages = Pages()


def topics(site: Shared) -> None:
    async def fragment(_: str) -> str:
        return site.fragment("nodes_live.html", nodes=await _standing(site))

    site.live.over("nodes", fragment)


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
