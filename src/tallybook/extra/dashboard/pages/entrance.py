"""Pages without a noun: the login of a dashboard with its own users, and the stream for live parts."""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tallybook.extra.dashboard.live import TooManyViewers
from tallybook.extra.dashboard.view import Pages, View, is_inside

pages = Pages()
_AT_ONCE, _IN_LINE = 2, 20
"""Passwords that are checked at the same time, at 0.1 s and 32 MB each, and those that may wait; more are refused."""
_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


class _Line:
    """The line for checks of passwords, one per site and event loop."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(_AT_ONCE)
        self.waiting = 0


@pages.page("/login")
async def login(view: View) -> Response:
    """Show the form; redirect a user who is already logged in."""
    if view.site.access.users is None or view.visit.user is not None:
        return RedirectResponse(view.url("/"), 303)
    return view.render("login.html", problem=None, name="", next=view.asked("next"))


async def enter(request: Request) -> Response:
    view = View(request, request.app.state.site)
    users = view.site.access.users
    if users is None:
        return RedirectResponse(view.url("/"), 303)
    said = {key: values[0] for key, values in view.visit.form.items()}
    name, onwards = said.get("name", "").strip()[:64], said.get("next", "")

    def again(status: int, problem: str) -> Response:
        return view.render("login.html", status=status, problem=problem, name=name, next=onwards)

    line = _line(request)
    if line.waiting >= _IN_LINE:
        return again(429, "Too many people are logging in right now. Try again.")
    if not users.may_try(name):
        return again(429, "Too many attempts for this name. Wait a minute.")
    line.waiting += 1
    try:
        async with line.turns:
            found = await asyncio.to_thread(users.login, name, said.get("password", ""))
    finally:
        line.waiting -= 1
    if found is None:
        return again(401, "Wrong name or password.")
    view.visit.session.login(found.user.name, found.mark)
    return RedirectResponse(onwards if is_inside(onwards, view.visit.root) else view.url("/"), 303)


def _line(request: Request) -> _Line:
    state = request.app.state
    if not hasattr(state, "line"):
        state.line = _Line()
    return cast(_Line, state.line)


async def leave(request: Request) -> Response:
    view = View(request, request.app.state.site)
    view.visit.session.renew()
    return RedirectResponse(view.url("/login"), 303)


pages.routes += [Route("/login", enter, methods=["POST"]), Route("/logout", leave, methods=["POST"])]


@pages.page("/events")
async def events(view: View) -> Response:
    """Stream server-sent events: one per changed topic, and a comment after 15 s without events."""
    if view.request.method == "HEAD":
        return Response(None, 200, _STREAM, "text/event-stream")
    try:
        stream = await view.site.live.watch(view.asked_all("topic")[:20])
    except TooManyViewers:
        return PlainTextResponse("this process has its maximum number of viewers\n", 503, {"retry-after": "30"})
    return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM)
