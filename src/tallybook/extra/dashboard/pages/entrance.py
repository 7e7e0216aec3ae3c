"""Pages without a noun: the login of a dashboard with its own users, and the stream for live parts."""

import asyncio
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tallybook.extra.dashboard.live import TooManyViewers
from tallybook.extra.dashboard.view import Pages, View, is_inside

pages = Pages()
_IN_LINE = 20  # logins that may be checked or wait at the same time; more are refused
_READS = 30.0  # seconds that a client of a stream has to read what was sent
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


@pages.page("/login")
async def login(view: View) -> Response:
    if view.site.access.users is None or view.visit.user is not None:
        return RedirectResponse(view.url("/"), 303)
    return view.render("login.html", problem=None, name="", next=view.asked("next"))


@pages.page("/login", "POST")
async def enter(view: View) -> Response:
    site, users = view.site, view.site.access.users
    if users is None:
        return RedirectResponse(view.url("/"), 303)
    said = {key: values[0] for key, values in view.visit.form.items()}
    name, onwards = said.get("name", "").strip()[:64], said.get("next", "")

    def again(status: int, problem: str) -> Response:
        return view.render("login.html", status=status, problem=problem, name=name, next=onwards)

    if site.waiting >= _IN_LINE:
        return again(429, "Too many people are logging in right now. Try again.")
    if not users.may_try(name):
        return again(429, "Too many attempts for this name. Wait a minute.")
    site.waiting += 1
    try:
        async with site.turns:
            found = await asyncio.to_thread(users.login, name, said.get("password", ""))
    finally:
        site.waiting -= 1
    if found is None:
        return again(401, "Wrong name or password.")
    view.visit.session.login(found.user.name, found.mark)
    return RedirectResponse(onwards if is_inside(onwards, view.visit.root) else view.url("/"), 303)


@pages.page("/logout", "POST")
async def leave(view: View) -> Response:
    view.visit.session.clear()  # the next one gets a new token
    return RedirectResponse(view.url("/login"), 303)


class _Events(StreamingResponse):
    """A stream that ends if its client stops reading, which would otherwise keep the place of a viewer."""

    body_iterator: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(_READS):
                await send(message)

        async with aclosing(self.body_iterator):
            with suppress(TimeoutError, ClientDisconnect):
                await super().__call__(scope, receive, send_soon)


@pages.page("/events")
async def events(view: View) -> Response:
    """Stream server-sent events: one per changed topic, and a comment after 15 s without events."""
    if view.request.method == "HEAD":
        return Response(None, 200, _STREAM, "text/event-stream")
    try:
        stream = await view.site.live.watch(view.asked_all("topic")[:20])
    except TooManyViewers:
        return PlainTextResponse("this process has its maximum number of viewers\n", 503, {"retry-after": "30"})
    return _Events(stream, media_type="text/event-stream", headers=_STREAM)
