"""One dashboard: its app, its databases, its access check and all its pages; and how to mount it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from tallybook._app import App
from tallybook._db.driver import Error
from tallybook.errors import TallybookError
from tallybook.extra.dashboard.access import Access
from tallybook.extra.dashboard.gate import Gate
from tallybook.extra.dashboard.metrics import health_routes, metrics_route
from tallybook.extra.dashboard.nodes import Nodes
from tallybook.extra.dashboard.view import Shared, View

log = logging.getLogger("tallybook.web")

NOUNS = (
    "overview", "queues", "jobs", "job", "dead", "subjects", "schedules", "workers", "limits", "providers",
    "maintenance", "audit",
)  # fmt: skip
"""The nouns, with one module each under pages/."""


class Site(Shared):
    """An ASGI application. Made by tallybook.web.dashboard."""

    def __init__(
        self, app: App, access: Access, nodes: Nodes, *, secret: str | None = None, metrics_token: str | None = None
    ) -> None:
        super().__init__(app, access, nodes, secret=secret)
        routes: list[Mount | Route] = [
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static"),
            # A user who may view the dashboard may also read its metrics.
            metrics_route(
                self.nodes, token=metrics_token, admits=lambda request: request.scope["tallybook"].user is not None
            ),
            *health_routes(self.nodes),
        ]
        for noun in ("entrance", *NOUNS, *(["nodes"] if self.nodes.many else [])):
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

        handlers: dict[Any, Any] = dict.fromkeys((TallybookError, Error, 500), self._error)
        handlers[HTTPException] = self._http_error
        built = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        built.state.site = self
        self.routes: list[BaseRoute] = built.routes
        self._asgi: ASGIApp = Gate(built, self, metrics_token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, as a standalone or mounted ASGI application."""
        self.root = scope.get("root_path", "").rstrip("/") or self.root
        await self._asgi(scope, receive, send)

    async def aclose(self) -> None:
        """Close the connections. The lifespan of a standalone dashboard calls this; a host that mounts it can do so."""
        await self.live.close()
        await self.nodes.close()

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        message = "There is no such page." if error.status_code == 404 else str(error.detail)
        return View(request, self).refused(error.status_code, message)

    async def _error(self, request: Request, error: Exception) -> Response:
        status, message, hint = self.explain(error)
        if status == 500:
            log.exception("the page %s failed", request.url.path, exc_info=error)
        return View(request, self).render(
            "error.html", status=status, title="This did not work", message=message, hint=hint
        )


def mounted(inner: ASGIApp, path: str, site: ASGIApp) -> ASGIApp:
    """Return an ASGI application that serves `site` below `path`, and `inner` elsewhere.

    application = mounted(get_asgi_application(), "/queue", dashboard(app, authenticate=who))
    """
    prefix = "/" + path.strip("/")
    if prefix == "/":
        raise ValueError("mounted needs a path for the dashboard, like '/queue'")

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "").rstrip("/")
        found = scope.get("path", "")
        if root and found.startswith(f"{root}/"):  # servers keep the prefix of their proxy in the path
            found = found[len(root) :]
        if scope["type"] in ("http", "websocket") and (found == prefix or found.startswith(f"{prefix}/")):
            scope = {**scope, "root_path": root + prefix}
            await site(scope, receive, send)
        else:
            await inner(scope, receive, send)

    return both
