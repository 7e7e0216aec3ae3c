"""The stream that feeds the live parts of every page."""

from __future__ import annotations

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from tallybook.extra.dashboard.live import TooManyViewers
from tallybook.extra.dashboard.view import Pages, View

__all__ = ["pages"]

pages = Pages()
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@pages.page("/events")
async def events(view: View) -> Response:
    """Server-sent events: one a topic that has changed, and a comment every 15 s."""
    if view.request.method == "HEAD":
        return Response(None, 200, _HEADERS, "text/event-stream")
    try:
        stream = await view.site.live.watch(view.asked_all("topic")[:20])
    except TooManyViewers:
        return PlainTextResponse("this process feeds as many viewers as it can\n", 503, {"retry-after": "30"})
    return StreamingResponse(stream, media_type="text/event-stream", headers=_HEADERS)
