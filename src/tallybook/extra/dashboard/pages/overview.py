"""Overview: how things stand, live. Every viewer gets what one poller has read."""

from __future__ import annotations

from datetime import timedelta

from starlette.responses import JSONResponse, Response

from tallybook._model.counting import Level, added
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
    async def fragment(only: str) -> str:
        return site.fragment("overview_live.html", only, **await site.overview.read(only))

    site.live.over("overview", fragment)
    site.live.over("point", site.overview.point)


@pages.page("/")
async def overview(view: View) -> Response:
    """The page; what is live on it is read once for the first sight."""
    span = view.asked("span", "15m")
    span = span if span in _SPANS else "15m"
    found = await view.site.overview.read(view.asked("node"), first=True)
    return view.render("overview.html", span=span, spans=_SPANS, **found)


@pages.page("/series")
async def series(view: View) -> Response:
    """The charts' points, as columns: time, then what completed, failed and came in, and how many were open, waiting and dead."""
    _, seconds, step = _SPANS.get(view.asked("span"), _SPANS["15m"])
    queue = view.asked("queue") or None

    async def read(conn: Conn, _: str) -> list[Level]:
        every, since = timedelta(seconds=step), timedelta(seconds=seconds)
        return await view.app.counts.levels(step=every, since=since, queue=queue).on(conn)

    levels = added(list((await view.ask(read)).values()))
    levels = levels[:-1] or levels  # the step that is not over would look like a fall
    columns = {
        "at": [one.begins.timestamp() for one in levels], "completed": [one.completed / step for one in levels],
        "failed": [one.failed / step for one in levels], "open": [one.open for one in levels],
        "waiting": [one.waiting for one in levels], "scheduled": [one.scheduled + one.retrying for one in levels],
        "dead": [one.dead for one in levels],
    }  # fmt: skip
    return JSONResponse({"step": step, **columns})
