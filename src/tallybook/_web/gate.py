"""In front of every page: security headers, the session, who is there, and whether a form is our own."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tallybook._web.session import Session
from tallybook._web.users import User

if TYPE_CHECKING:
    from tallybook._web.site import Site

__all__ = ["Gate", "Visit"]

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_LARGEST_FORM = 256 * 1024
_OPEN = ("/login", "/healthz", "/readyz")
"""What anybody may ask for; static files, too."""


@dataclass
class Visit:
    """One request: who, with which session, and what the form said."""

    session: Session
    user: User | None
    root: str
    form: dict[str, list[str]] = field(default_factory=dict)
    notice: tuple[str, str] | None = None


class Gate:
    """ASGI middleware; no answer leaves without its headers."""

    def __init__(self, inner: ASGIApp, site: Site) -> None:
        self._inner = inner
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        request = Request(scope, receive)
        root = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(root) if root else scope["path"]
        static = path.startswith("/static/")
        session = self._site.sessions.read(request.headers.get("cookie", ""))
        visit = Visit(session, None, root)
        scope["tallybook"] = visit

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = "public, max-age=3600" if static else "no-store"
                if session.changed and not static:
                    secure = scope.get("scheme") == "https"
                    headers.append("set-cookie", self._site.sessions.written(session, root=root, secure=secure))
            await send(message)

        answer = await self._answer(request, path, visit, static)
        await (answer or self._inner)(scope, receive, headed)

    async def _answer(self, request: Request, path: str, visit: Visit, static: bool) -> ASGIApp | None:
        """What to say in place of the page; None: go on."""
        if path == "":
            return RedirectResponse(f"{visit.root}/", 307)
        if static or path in _OPEN[1:]:
            return None
        visit.user = await self._site.access.user(request, visit.session)
        if visit.user is None and path not in (_OPEN[0], "/metrics"):  # the metrics have a way in of their own
            return self._site.nobody(request, visit)
        return None if request.method in ("GET", "HEAD") else await self._change(request, path, visit)

    async def _change(self, request: Request, path: str, visit: Visit) -> ASGIApp | None:
        """The same for what is not only read."""
        site = self._site
        try:
            visit.form = await _form(request)
        except ValueError as error:
            return site.refused(request, visit, 400, str(error))
        if not _is_same_origin(request) or not _has_token(visit):
            why = "This form did not come from this dashboard, or its session is over. Load the page again, then repeat it."
            return site.refused(request, visit, 403, why)
        if path not in ("/login", "/logout") and not (visit.user and visit.user.operate):
            return site.refused(request, visit, 403, site.why_read_only(visit.user))
        return None


async def _form(request: Request) -> dict[str, list[str]]:
    if request.method != "POST":
        raise ValueError("Pages are read by GET and changed by POST.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise ValueError("A form was expected.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_FORM:
            raise ValueError("This form is too large.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=2000, errors="strict")
    except ValueError:
        raise ValueError("This form cannot be read.") from None


def _is_same_origin(request: Request) -> bool:
    """What the browser itself says of where a form comes from; the token is asked for besides."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


def _has_token(visit: Visit) -> bool:
    given = (visit.form.get("token") or [""])[0]
    held = visit.session.get("token")
    return isinstance(held, str) and hmac.compare_digest(given.encode(), held.encode())
