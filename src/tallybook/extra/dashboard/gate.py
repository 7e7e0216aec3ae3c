"""The middleware for every page: security headers, the session, the user, and the check of forms."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qs, unquote_plus, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tallybook.extra.dashboard.access import Access
from tallybook.extra.dashboard.session import Session, Sessions
from tallybook.extra.dashboard.users import User

log = logging.getLogger("tallybook.web")

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
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
_OPEN = ("/login", "/healthz", "/readyz")
"""Paths without access check, in addition to static files."""
_FRESH = {"/static/vendor/": "public, max-age=31536000, immutable"}  # their names carry their versions


@dataclass
class Visit:
    """One request: its user, its session and its form."""

    session: Session
    user: User | None
    root: str
    form: dict[str, list[str]] = field(default_factory=dict)
    notice: tuple[str, str] | None = None


class GatedSite(Protocol):
    """The part of a Site that its gate uses."""

    access: Access
    sessions: Sessions

    def is_scraper(self, request: Request) -> bool: ...
    def nobody(self, request: Request, visit: Visit) -> ASGIApp: ...
    def refused(self, request: Request, visit: Visit, status: int, why: str) -> Response: ...
    def why_read_only(self, user: User | None) -> str: ...


class Gate:
    """ASGI middleware that adds its headers to every answer."""

    def __init__(self, inner: ASGIApp, site: GatedSite) -> None:
        self._inner = inner
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        readable = _is_text(scope.get("query_string", b""))
        if not readable:  # any code that reads the address would fail, also the error page
            scope["query_string"] = b""
        request = Request(scope, receive)
        root = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(root) if root else scope["path"]
        static = path.startswith("/static/")
        host = request.headers.get("host", "")
        session = self._site.sessions.read(request.headers.get("cookie", ""), host)
        visit = Visit(session, None, root)
        scope["tallybook"] = visit

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = _cached(path, message["status"]) if static else "no-store"
                if session.changed and not static:
                    secure = scope.get("scheme") == "https"
                    headers.append("set-cookie", self._site.sessions.written(session, host, root=root, secure=secure))
            await send(message)

        try:
            answer = (
                await self._answer(request, path, visit, static)
                if readable
                else self._site.refused(request, visit, 400, "This address cannot be read.")
            )
        except ClientDisconnect:
            return
        except HTTPException as error:  # the host's hook may raise its own refusal
            answer = self._site.refused(request, visit, error.status_code, error.detail)
            answer.headers.update(error.headers or {})
        except Exception:
            log.exception("access denied: the function that identifies users failed")
            answer = self._site.refused(request, visit, 500, "You could not be identified. See the log of the server.")
        await (answer or self._inner)(scope, receive, headed)

    async def _answer(self, request: Request, path: str, visit: Visit, static: bool) -> ASGIApp | None:
        """Return the answer that replaces the page, or None to serve the page."""
        if path == "":
            return RedirectResponse(f"{visit.root}/", 307)
        # The token of the metrics is checked before the host's hook, which knows people and may refuse the request.
        if static or path in _OPEN[1:] or (path == "/metrics" and self._site.is_scraper(request)):
            return None
        if _is_embedded(request):
            return self._site.refused(
                request, visit, 403, "Another site may link to this dashboard, but not load from it."
            )
        if "\0" in path or "\0" in unquote_plus(request.url.query):  # PostgreSQL's texts cannot contain it
            return self._site.refused(request, visit, 400, "This address cannot be read.")
        visit.user = await self._site.access.user(request, visit.session)
        if visit.user is None and path not in (_OPEN[0], "/metrics"):  # the metrics have their own access check
            return self._site.nobody(request, visit)
        return None if request.method in ("GET", "HEAD") else await self._change(request, path, visit)

    async def _change(self, request: Request, path: str, visit: Visit) -> ASGIApp | None:
        """Check a request that changes something. Return a refusal, or None to serve it."""
        site = self._site
        try:
            visit.form = await _form(request)
        except _BadForm as error:
            return site.refused(request, visit, error.status, str(error))
        if not _is_same_origin(request) or not _has_token(visit):
            why = "This form did not come from this dashboard, or its session has ended. Reload the page and repeat it."
            return site.refused(request, visit, 403, why)
        if path not in ("/login", "/logout") and not (visit.user and visit.user.operate):
            return site.refused(request, visit, 403, site.why_read_only(visit.user))
        return None


class _BadForm(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def _form(request: Request) -> dict[str, list[str]]:
    if request.method != "POST":
        raise _BadForm(405, "Use GET to read pages and POST to change something.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise _BadForm(415, "A form was expected.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_FORM:
            raise _BadForm(413, "This form is too large.")
    try:
        found = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=2000, errors="strict")
    except ValueError:
        raise _BadForm(400, "This form cannot be read.") from None
    if any("\0" in value for values in found.values() for value in values):
        raise _BadForm(400, "This form cannot be read.")
    return found


def _is_embedded(request: Request) -> bool:
    """Return whether a page of another site loads this, rather than a person who follows a link."""
    site = request.headers.get("sec-fetch-site")
    return site in ("cross-site", "same-site") and request.headers.get("sec-fetch-mode") != "navigate"


def _is_same_origin(request: Request) -> bool:
    """Return whether, according to the browser, the form comes from this site. The token is checked as well.

    Browsers send Sec-Fetch-Site on https and on this machine. Elsewhere the Origin is compared with the Host, so a
    proxy must not replace the Host.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("host", "").lower()
    except ValueError:  # not an address
        return False


def _has_token(visit: Visit) -> bool:
    given = (visit.form.get("token") or [""])[0]
    held = visit.session.get("token")
    return isinstance(held, str) and hmac.compare_digest(given.encode(), held.encode())


def _is_text(query: bytes) -> bool:
    try:
        query.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cached(path: str, status: int) -> str:
    """Return the Cache-Control of a static file; an error is not cached."""
    if status >= 400:
        return "no-store"
    return next((value for folder, value in _FRESH.items() if path.startswith(folder)), "no-cache")
