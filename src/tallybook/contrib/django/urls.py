"""The dashboard in a Django project, behind Django's own login, under WSGI and ASGI. Needs `tallybook[web]`.

    # project/urls.py
    path("queue/", include("tallybook.contrib.django.urls")),

Staff with the right to view everything that the admin shows of Tallybook may see it;
those with the right to change all of it may act.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

import anyio
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse, StreamingHttpResponse
from django.urls import NoReverseMatch, re_path, reverse
from django.utils.crypto import salted_hmac
from django.views.decorators.csrf import csrf_exempt
from starlette.types import ASGIApp, Message

from tallybook.contrib.django import _settings
from tallybook.web import User, dashboard

T = TypeVar("T")

_STREAM = "text/event-stream"
_LAST = b"event: live\n"  # the last event of a reading: under WSGI a stream ends there, and the browser reconnects
_SHOWN = ("job", "deadletter", "queue", "schedule")


class Bridge:
    """One application with its loop. A forked process needs its own bridge."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._loop = app, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="tallybook-dashboard", daemon=True).start()

    def answer(self, request: Any, root: str, **more: Any) -> HttpResponse | StreamingHttpResponse:
        """Return the application's response to this Django request; `more` is added to its scope."""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method,
            "scheme": request.scheme, "root_path": root, "path": request.path, "raw_path": request.path.encode(),
            "query_string": request.META.get("QUERY_STRING", "").encode("latin-1"),
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1"))
                        for name, value in request.headers.items()],
            "client": (request.META.get("REMOTE_ADDR", ""), 0), "server": (request.get_host(), None), **more,
        }  # fmt: skip
        exchange = _Exchange(self._app, scope, request.body)
        start = self._run(exchange.start()).result()
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
        kind = next((value for name, value in headers if name == "content-type"), "")
        response: HttpResponse | StreamingHttpResponse
        if kind.startswith(_STREAM):
            chunks = self._later(exchange) if hasattr(request, "scope") else self._until_last(exchange)
            response = StreamingHttpResponse(chunks, status=start["status"])
        else:
            response = HttpResponse(self._run(exchange.rest()).result(), status=start["status"])
        del response.headers["content-type"]
        for name, value in headers:
            if name == "set-cookie":
                response.cookies.load(value)
            else:
                response.headers[name] = value
        return response

    def _until_last(self, exchange: _Exchange) -> Iterator[bytes]:
        """Yield one reading, for WSGI, where a stream occupies a thread."""
        try:
            while chunk := self._run(exchange.chunk()).result():
                yield chunk
                if chunk.startswith(_LAST):
                    return
        finally:
            self._run(exchange.close()).result()

    async def _later(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        """Yield the stream while the client reads it, for ASGI."""
        try:
            while chunk := await asyncio.wrap_future(self._run(exchange.chunk())):
                yield chunk
        finally:
            self._run(exchange.close())

    def _run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _Exchange:
    """One request and its response, on the loop."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], body: bytes) -> None:
        self._app, self._scope, self._body = app, scope, body

    async def start(self) -> Message:
        """Return the status and the headers, or raise an error that comes before them."""
        self._send, self._messages = anyio.create_memory_object_stream[Message](0)
        self._task = asyncio.create_task(self._answer())
        try:
            return await self._messages.receive()
        except anyio.EndOfStream:
            await self._task
            raise

    async def chunk(self) -> bytes:
        """Return the next part of the body, empty at its end."""
        try:
            while not (body := (await self._messages.receive()).get("body", b"")):
                pass
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            return b""
        return bytes(body)

    async def rest(self) -> bytes:
        found = bytearray()
        while chunk := await self.chunk():
            found += chunk
        await self.close()
        return bytes(found)

    async def close(self) -> None:
        """Stop: the client reads no more."""
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # already logged where it was raised, and answered

    async def _answer(self) -> None:
        asked = [self._body]

        async def receive() -> Message:
            if asked:
                return {"type": "http.request", "body": asked.pop(), "more_body": False}
            await asyncio.Event().wait()  # until it is cancelled
            return {"type": "http.disconnect"}

        async with self._send:
            await self._app(self._scope, receive, self._send.send)


@cache
def _bridge(process: int) -> Bridge:
    from tallybook.contrib.django.worker import app

    site = dashboard(
        app,
        authenticate=lambda request: request.scope["django_user"],
        secret=salted_hmac("tallybook.dashboard", "", algorithm="sha256").hexdigest(),
        dsn=_settings.dsn(_settings.read().database),
    )
    return Bridge(site)


@csrf_exempt  # its forms have their own token, which its session signs
def _dashboard(request: Any, rest: str) -> Any:
    user = request.user
    if not user.is_authenticated:
        try:
            login = str(reverse("admin:login"))
        except NoReverseMatch:
            login = str(settings.LOGIN_URL)
        return redirect_to_login(request.get_full_path(), login)
    if not user.is_staff or not all(_may(user, "view", one) or _may(user, "change", one) for one in _SHOWN):
        raise PermissionDenied
    name = str(user.get_username())[:200] or f"user {user.pk}"
    known = User(name, operate=all(_may(user, "change", one) for one in _SHOWN))
    root = request.path[: len(request.path) - len(rest)].rstrip("/")
    return _bridge(os.getpid()).answer(request, root, django_user=known)


def _may(user: Any, verb: str, model: str) -> bool:
    return bool(user.has_perm(f"tallybook.{verb}_{model}"))


urlpatterns = [re_path(r"^(?P<rest>.*)$", _dashboard, name="tallybook-dashboard")]
