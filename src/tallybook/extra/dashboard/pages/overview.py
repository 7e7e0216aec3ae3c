"""Overview: how things stand, live. Every viewer gets what one poller has read."""

from __future__ import annotations

from datetime import timedelta

from starlette.responses import JSONResponse, Response

from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.shared import Shared
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_SPANS = {
    "15m": ("15 minutes", 900, 60),
    "3h": ("3 hours", 10_800, 300),
    "1d": ("1 day", 86_400, 1800),
    "7d": ("7 days", 604_800, 14_400),
}


def topics(site: Shared) -> None:
    async def fragment(conn: Conn, _: str) -> str:
        return site.fragment("overview_live.html", **await site.overview.read(conn))

    site.live.topic("overview", fragment, single=True)
    site.live.topic("point", site.overview.point, single=True)


@pages.page("/")
async def overview(view: View) -> Response:
    """The page; what is live on it is read once for the first sight."""
    span = view.asked("span", "15m")
    span = span if span in _SPANS else "15m"
    async with view.read() as conn:
        found = await view.site.overview.first(conn)
    return view.render("overview.html", span=span, spans=_SPANS, **found)


@pages.page("/series")
async def series(view: View) -> Response:
    """The charts' points, as columns: time, then what completed, failed and came in, and how many were open, waiting and dead."""
    _, seconds, step = _SPANS.get(view.asked("span"), _SPANS["15m"])
    queue = view.asked("queue") or None
    async with view.read() as conn:
        levels = await view.app.counts.levels(
            step=timedelta(seconds=step), since=timedelta(seconds=seconds), queue=queue
        ).on(conn)
    levels = levels[:-1] or levels  # the step that is not over would look like a fall
    columns = {
        "at": [one.begins.timestamp() for one in levels], "completed": [one.completed / step for one in levels],
        "failed": [one.failed / step for one in levels], "open": [one.open for one in levels],
        "waiting": [one.waiting for one in levels], "scheduled": [one.scheduled + one.retrying for one in levels],
        "dead": [one.dead for one in levels],
    }  # fmt: skip
    return JSONResponse({"step": step, **columns})
