"""In and out: the login, for a dashboard that has users of its own."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from tallybook._web.view import Pages, View

__all__ = ["pages"]

pages = Pages()


@pages.page("/login")
async def login(view: View) -> Response:
    """The form; whoever is in already goes on."""
    if view.site.access.users is None or view.visit.user is not None:
        return RedirectResponse(view.url("/"), 303)
    return view.render("login.html", problem=None, name="")


async def enter(request: Request) -> Response:
    """Name and password."""
    view = View(request, request.app.state.site)
    users = view.site.access.users
    if users is None:
        return RedirectResponse(view.url("/"), 303)
    name = (view.visit.form.get("name") or [""])[0].strip()[:64]
    password = (view.visit.form.get("password") or [""])[0]
    if users.must_wait(name):
        problem = "Too many wrong passwords for this name. Wait a minute."
        return view.render("login.html", status=429, problem=problem, name=name)
    found = await asyncio.to_thread(users.login, name, password)
    if found is None:
        return view.render("login.html", status=401, problem="Name and password do not fit.", name=name)
    view.visit.session.renew()
    view.visit.session["user"], view.visit.session["mark"] = found.user.name, found.mark
    return RedirectResponse(view.url("/"), 303)


async def leave(request: Request) -> Response:
    """End the session of this browser."""
    view = View(request, request.app.state.site)
    view.visit.session.renew()
    return RedirectResponse(view.url("/login"), 303)


pages.routes += [Route("/login", enter, methods=["POST"]), Route("/logout", leave, methods=["POST"])]
