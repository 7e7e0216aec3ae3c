"""One dashboard: its pages, the middleware in front of them (headers, session, user, forms), and how to mount it."""

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tallybook._app import App
from tallybook._db.driver import Error
from tallybook.errors import TallybookError
from tallybook.extra.dashboard.access import Access, Visit
from tallybook.extra.dashboard.metrics import health_routes, knows_token, metrics_route
from tallybook.extra.dashboard.nodes import Nodes
from tallybook.extra.dashboard.view import Shared, View

log = logging.getLogger("tallybook.web")

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " font-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" a browser would send Origin: null with our own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LARGEST_FORM = 256 * 1024
_OPEN = ("/login", "/healthz", "/readyz")  # paths without access check, in addition to static files
_UNREADABLE = "This address cannot be read."
_PAGES = (
    "entrance", "overview", "queues", "jobs", "job", "subjects", "schedules", "limits", "providers", "maintenance",
)  # fmt: skip


class Site(Shared):
    """An ASGI application. Made by tallybook.web.dashboard."""

    def __init__(
        self, app: App, access: Access, nodes: Nodes, *, secret: str | None = None, metrics_token: str | None = None
    ) -> None:
        super().__init__(app, access, nodes, secret=secret)
        routes: list[Mount | Route] = [
            Mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static"),
            # A user who may view the dashboard may also read its metrics.
            metrics_route(nodes, token=metrics_token, admits=lambda asked: asked.scope["tallybook"].user is not None),
            *health_routes(nodes),
        ]
        for name in _PAGES:
            module = import_module(f"tallybook.extra.dashboard.pages.{name}")
            routes += [one for one in module.pages.routes if one.path != "/nodes" or nodes.many]
            if hasattr(module, "topics"):
                module.topics(self)

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await self.aclose()

        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, TallybookError, Error, 500), self._error)
        built = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
        built.state.site = self
        self.routes: list[BaseRoute] = built.routes
        self._inner: ASGIApp = built
        self._metrics_token = metrics_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, as a standalone or mounted ASGI application. Every answer gets the headers."""
        root = scope.get("root_path", "").rstrip("/")
        self.root = root or self.root
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        readable = True
        try:
            scope.get("query_string", b"").decode()
        except UnicodeDecodeError:  # any code that reads the address would fail, also the error page
            scope["query_string"], readable = b"", False
        request = Request(scope, receive)
        path = scope["path"].removeprefix(root) if root else scope["path"]
        static = path.startswith("/static/")
        host = request.headers.get("host", "")
        session = self.sessions.read(request.headers.get("cookie", ""), host)
        visit = Visit(session, None, root)
        scope["tallybook"] = visit

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                cached = "no-store"
                if static and message["status"] < 400:
                    is_versioned = path.startswith("/static/vendor/")  # by its name
                    cached = "public, max-age=31536000, immutable" if is_versioned else "no-cache"
                headers.setdefault("cache-control", cached)
                if session.changed and not static:
                    secure = scope.get("scheme") == "https"
                    headers.append("set-cookie", self.sessions.written(session, host, root=root, secure=secure))
            await send(message)

        answer: ASGIApp | None
        try:
            if not readable:
                raise HTTPException(400, _UNREADABLE)
            answer = await self._answer(request, path, visit, static)
        except ClientDisconnect:
            return
        except HTTPException as error:  # the host's hook may raise one as well
            answer = View(request, self).refused(error.status_code, error.detail)
            answer.headers.update(error.headers or {})
        except Exception:
            log.exception("access denied: the function that identifies users failed")
            answer = View(request, self).refused(500, "You could not be identified. See the log of the server.")
        await (answer or self._inner)(scope, receive, headed)

    async def aclose(self) -> None:
        """Close the connections. The lifespan of a standalone dashboard calls this; a host that mounts it can do so."""
        await self.live.close()
        await self.nodes.close()

    async def _answer(self, request: Request, path: str, visit: Visit, static: bool) -> ASGIApp | None:
        """Return the answer that replaces the page, or None to serve the page. HTTPException for a refusal."""
        if path == "":
            return RedirectResponse(f"{visit.root}/", 307)
        # The token of the metrics is checked before the host's hook, which knows people and may refuse the request.
        is_scraper = request.method in ("GET", "HEAD") and knows_token(request, self._metrics_token)
        if static or path in _OPEN[1:] or (path == "/metrics" and is_scraper):
            return None
        # A person may follow a link of another site, but no page of it may load from here.
        site, mode = (request.headers.get(f"sec-fetch-{what}") for what in ("site", "mode"))
        if site in ("cross-site", "same-site") and mode != "navigate":
            raise HTTPException(403, "Another site may link to this dashboard, but not load from it.")
        if "\0" in path or "\0" in unquote_plus(request.url.query):  # PostgreSQL's texts cannot contain it
            raise HTTPException(400, _UNREADABLE)
        visit.user = await self.access.user(request, visit.session)
        if visit.user is None and path not in (_OPEN[0], "/metrics"):  # the metrics have their own access check
            return self._nobody(request)
        if request.method not in ("GET", "HEAD"):
            visit.form = await _form(request)
            given, held = (visit.form.get("token") or [""])[0], visit.session.get("token")
            has_token = isinstance(held, str) and hmac.compare_digest(given.encode(), held.encode())
            if not has_token or not _is_same_origin(request):
                why = "This form did not come from this dashboard, or its session has ended."
                raise HTTPException(403, f"{why} Reload the page and repeat it.")
            if path not in ("/login", "/logout") and not (visit.user and visit.user.operate):
                raise HTTPException(403, self.why_read_only(visit.user))
        return None

    def _nobody(self, request: Request) -> ASGIApp:
        """Lead a person without a user to the login, and refuse all others."""
        if self.access.users is not None:
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                view = View(request, self)
                return RedirectResponse(view.url("/login", next=view.here), 303)
            raise HTTPException(401, "Log in first.")
        if self.access.is_local:
            why = "Without users or a hook of the application, this dashboard accepts only requests from this machine,"
            why += " sent to localhost or a loopback address. Use --users, or authenticate=, to give others access."
            raise HTTPException(403, why)
        raise HTTPException(403, "You may not see this dashboard.")

    async def _error(self, request: Request, error: Exception) -> Response:
        view = View(request, self)
        if isinstance(error, HTTPException):
            message = "There is no such page." if error.status_code == 404 else str(error.detail)
            return view.refused(error.status_code, message)
        status, why, hint = self.explain(error)
        if status == 500:
            log.exception("the page %s failed", request.url.path, exc_info=error)
        return view.render("error.html", status=status, title="This did not work", message=why, hint=hint)


async def _form(request: Request) -> dict[str, list[str]]:
    if request.method != "POST":
        raise HTTPException(405, "Use GET to read pages and POST to change something.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "A form was expected.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_FORM:
            raise HTTPException(413, "This form is too large.")
    try:
        found = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=2000, errors="strict")
        if any("\0" in value for values in found.values() for value in values):
            raise ValueError("a NUL")
    except ValueError:
        raise HTTPException(400, "This form cannot be read.") from None
    return found


def _is_same_origin(request: Request) -> bool:
    """Return whether, according to the browser, the form comes from this site. The token is checked as well."""
    # Browsers send this header on https and on this machine only. Elsewhere a proxy must not replace the Host.
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    except ValueError:  # not an address
        return False


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
