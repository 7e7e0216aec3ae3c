"""One dashboard: its app, its database, who may use it, and its pages put together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from tallybook.errors import (
    CommitUnknown,
    InvalidArgument,
    KeyTaken,
    QueueUnavailable,
    SchemaError,
    TallybookError,
    UnknownJob,
    UnknownProvider,
    UnknownQueue,
    UnknownSchedule,
    UnknownTask,
)
from tallybook.extra.dashboard.access import Access
from tallybook.extra.dashboard.database import IN_THE_WAY, Database
from tallybook.extra.dashboard.gate import Gate, Visit
from tallybook.extra.dashboard.live import Live
from tallybook.extra.dashboard.metrics import health_routes, knows_token, metrics_route
from tallybook.extra.dashboard.render import environment
from tallybook.extra.dashboard.session import Sessions
from tallybook.extra.dashboard.users import User
from tallybook.extra.dashboard.view import View

if TYPE_CHECKING:
    from tallybook._app import App
    from tallybook.extra.dashboard.pages.overview import Overview

__all__ = ["Site"]

log = logging.getLogger("tallybook.web")

NOUNS = (
    "overview", "queues", "jobs", "job", "dead", "subjects", "schedules", "workers", "limits", "providers", "upkeep", "audit",
)  # fmt: skip
"""One file each under pages/."""
_STATUS: dict[type[Exception], int] = {
    UnknownJob: 404, UnknownQueue: 404, UnknownSchedule: 404, UnknownTask: 404, UnknownProvider: 404, InvalidArgument: 400,
    KeyTaken: 409, QueueUnavailable: 503, CommitUnknown: 503, SchemaError: 503,
}  # fmt: skip

_IN_DOUBT = "The database was lost at the commit: this was done, or it was not. Look before you do it again."


class Site:
    """An ASGI application. Made by tallybook.web.dashboard."""

    def __init__(
        self,
        app: App,
        access: Access,
        *,
        dsn: str | None = None,
        secret: str | None = None,
        metrics_token: str | None = None,
    ) -> None:
        self.app = app
        self.access = access
        self.database = Database(app, dsn=dsn)
        self.live = Live(self.database)
        self.sessions = Sessions(secret)
        self._metrics_token = metrics_token
        self.overview: Overview | None = None
        """What the overview keeps from one reading to the next."""
        self.env = environment()
        self.root = ""
        """Where the dashboard is mounted, as the first request said: for what is written once for all viewers."""
        pages = self._starlette(metrics_token)
        self.routes: list[BaseRoute] = pages.routes
        """Everything that it answers."""
        self._asgi: ASGIApp = Gate(pages, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As an ASGI application, run by itself or mounted."""
        self.root = scope.get("root_path", "").rstrip("/") or self.root
        await self._asgi(scope, receive, send)

    async def aclose(self) -> None:
        """Close its connections. Where it is run by itself its lifespan does; a host that mounts it may call it at its end."""
        await self.live.close()
        await self.database.close()

    def is_scraper(self, request: Request) -> bool:
        """Whether it reads with the token of the metrics, which is all that it can read."""
        token = self._metrics_token
        return token is not None and request.method in ("GET", "HEAD") and knows_token(request, token)

    def fragment(self, template: str, **values: Any) -> str:
        """A piece of a page that all viewers get: without anything that is only for one of them."""

        def url(path: str, **query: Any) -> str:
            from urllib.parse import urlencode

            said = {key: value for key, value in query.items() if value not in (None, "", [])}
            return f"{self.root}{path}" + (f"?{urlencode(said, doseq=True)}" if said else "")

        return self.env.get_template(template).render(url=url, **values)

    def nobody(self, request: Request, visit: Visit) -> ASGIApp:
        """What somebody gets who may not look."""
        if self.access.users is not None:
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                view = View(request, self)
                return RedirectResponse(view.url("/login", next=view.here), 303)
            return self.refused(request, visit, 401, "Log in first.")
        why = (
            "Without users or a hook of the application this dashboard answers only to this machine, by its own name."
            " Say --users, or authenticate=, to let others in."
            if self.access.is_local
            else "You may not see this dashboard."
        )
        return self.refused(request, visit, 403, why)

    def refused(self, request: Request, visit: Visit, status: int, why: str) -> Response:
        """A page that says why not."""
        return View(request, self).render("error.html", status=status, title="Not this way", message=why, hint=None)

    def why_read_only(self, user: User | None) -> str:
        """Why somebody who looks cannot act."""
        if self.access.read_only:
            return "This dashboard is read-only. Start it with --operate, or with read_only=False, to change things from here."
        return f"{user.name if user else 'You'} may look, but not change anything."

    def explain(self, error: Exception) -> tuple[int, str, str | None]:
        """From an exception to a status, a sentence and a hint; never a text that was not meant for people."""
        if isinstance(error, psycopg.errors.QueryCanceled):
            return (
                504,
                "The database did not answer in time, so this was given up.",
                "Narrow what is looked for, or try again.",
            )
        if isinstance(error, IN_THE_WAY):
            return 503, "Somebody else holds what this needs. Nothing was changed.", "Try again."
        if isinstance(error, psycopg.DataError) and error.sqlstate:  # without one it is we who cannot read an answer
            return 400, "The database cannot take one of these values.", None
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            return (
                403,
                "The database does not let this dashboard do that.",
                "Its login needs the operator's role: see docs/roles.md",
            )
        if isinstance(error, TallybookError):
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 400)
            return status, _IN_DOUBT if isinstance(error, CommitUnknown) else str(error), None
        return 500, "Something went wrong in the dashboard. Its log says what.", None

    def _starlette(self, metrics_token: str | None) -> Starlette:
        routes: list[Mount | Route] = [
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static"),
            metrics_route(self.database, token=metrics_token, admits=_has_user),
            *health_routes(self.database),
        ]
        for noun in ("entrance", "live", *NOUNS):
            module = import_module(f"tallybook.extra.dashboard.pages.{noun}")
            routes += module.pages.routes
            if hasattr(module, "topics"):
                module.topics(self)

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self.aclose()

        handlers: dict[Any, Any] = {
            HTTPException: self._http_error,
            TallybookError: self._error,
            psycopg.Error: self._error,
        }
        built = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers | {500: self._crash})
        built.state.site = self
        return built

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        message = "There is no such page." if error.status_code == 404 else str(error.detail)
        return self.refused(request, request.scope["tallybook"], error.status_code, message)

    async def _error(self, request: Request, error: Exception) -> Response:
        status, message, hint = self.explain(error)
        if status == 500:
            log.exception("the page %s failed", request.url.path, exc_info=error)
        return View(request, self).render(
            "error.html", status=status, title="This did not work", message=message, hint=hint
        )

    async def _crash(self, request: Request, error: Exception) -> Response:
        return await self._error(request, error)


def _has_user(request: Request) -> bool:
    """Whoever may see the dashboard may read its metrics, too."""
    return request.scope["tallybook"].user is not None
