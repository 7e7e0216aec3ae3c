"""The operator API as an ASGI app: the handling of one request.

1.  The path and the method select an operation, or the answer is 404 or 405: the list of endpoints is not secret.
2.  Four headers name the key. Without them nothing is read.
3.  The body is read, 1 MB at most, and the signature is checked: 401.
4.  The scope of the key is checked, then the values: 403, 400, 415, 422. So far nothing depends on the database, and
    the same request would be refused in the same way at any time.
5.  A change: one transaction has the nonce, the action and the audit row. The action runs in a savepoint. A refused
    action leaves nothing but the used nonce, which commits: nobody can replay an intercepted request later, when it
    would no longer be refused. If the server or the process dies before the commit, nothing has happened, and the same
    request is valid again. A reading: the nonce is committed first; then the reading runs in a read-only transaction.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tallybook._app import App
from tallybook._app.history import NONCE_TAKE
from tallybook._db.verb import run
from tallybook._model.payload import parse
from tallybook.errors import CommitUnknown, QueueUnavailable
from tallybook.extra.dashboard.database import READ_TIMEOUT, Conn, Database
from tallybook.extra.dashboard.nodes import At, Nodes, sorted_out
from tallybook.extra.dashboard.site import mounted
from tallybook.extra.operator import openapi
from tallybook.extra.operator.fields import read, read_query
from tallybook.extra.operator.keys import Key, KeyRing, read_keys
from tallybook.extra.operator.operations import Ask, Changed, Operation, merged
from tallybook.extra.operator.problems import Problem, problem_of
from tallybook.extra.operator.routes import found
from tallybook.extra.operator.signing import Signed, proved, served_path, signed_by

log = logging.getLogger("tallybook.api")

PREFIX = "/api/v1"
MAX_BYTES = 1_000_000
MAX_DEPTH = 64
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
# An unterminated string extends to the end of the body. Nothing backtracks, so any body is scanned once.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


def operator_api(
    app: App,
    *,
    keys: str | os.PathLike[str] | Iterable[Key],
    dsn: str | None = None,
    max_size: int = 4,
    read_only: bool = False,
    nodes: str | None = None,
) -> OperatorApi:
    """Return the operator API of `app` as an ASGI app. Run it alone, or mount it, for example under /api/v1.

    `keys` is a file (see https://github.com/tallybook/tallybook/blob/main/docs/operator-api.md) or a list of Key; each
    request is signed with one of them. `dsn` defaults to that of the App. The API opens at most `max_size` connections
    to each node, and none before the first request. `read_only` refuses every change, also to keys that allow it.

    `nodes` is "all", or names like "north,south". Lists then cover all these nodes, the id of a job determines its
    node, and any other change names its `node`. Raises ConfigError.

        uvicorn.run(operator_api(app, keys="/etc/tallybook/keys.toml"), port=8801)
    """
    given = read_keys(keys) if isinstance(keys, str | os.PathLike) else keys
    return OperatorApi(app, KeyRing(given), Nodes(app, dsn=dsn, which=nodes, most=max_size), read_only=read_only)


def beside(site: ASGIApp, api: OperatorApi) -> ASGIApp:
    """Return an ASGI app that serves the API below /api/v1 and the site elsewhere, with the site's lifespan for both.

    The access check of the dashboard does not apply to the API: its requests are signed.
    """
    both = mounted(site, PREFIX, api)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await both(scope, receive, send)
        if scope["type"] == "lifespan":
            await api.close()

    return serve


class OperatorApi:
    """An ASGI app. Call `close()` if no server closes its connections with the lifespan protocol."""

    def __init__(self, app: App, ring: KeyRing, nodes: Nodes, *, read_only: bool = False) -> None:
        self._app, self._ring, self._nodes, self._read_only = app, ring, nodes, read_only

    async def close(self) -> None:
        """Close the connections; the next request opens them again."""
        await self._nodes.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan of a server that runs only this app."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await self.close()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            try:
                response = await self._answer(scope, receive)
            except ClientDisconnect:
                return
            except Exception as error:
                problem = problem_of(error)
                log.info("%s: %s %s", problem.status, problem.code, scope["method"])
                response = problem.response()
            response.headers.update(_HEADERS)
            await response(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        path = served_path(scope)
        if path == openapi.PATH:
            if scope["method"] != "GET":
                raise Problem("method", f"{path} does not have this method", headers={"Allow": "GET"})
            return _json(openapi.document(scope.get("root_path", ""), many=self._nodes.many))
        operation, in_path = found(scope["method"], path)
        headers = list(scope["headers"])
        signed = signed_by(headers)
        body = await read_body(Request(scope, receive))
        key = proved(signed, self._ring, scope, body)
        if not key.may(operation.scope):
            raise Problem("scope", f"this needs the scope {operation.scope}, which the key lacks")
        if self._read_only and operation.changes is not None:
            raise Problem("read_only", "this server is read-only")
        if operation.whole and key.queues is not None:
            raise Problem("queue", "this is about all queues, and the key is limited to some")
        sent = parsed(body, [value for name, value in headers if name.lower() == b"content-type"])
        values = read(operation.in_path, in_path, text=True)
        values |= read_query(operation.in_query, scope.get("query_string", b""))
        values |= read(operation.in_body, sent)
        for field in (*operation.in_query, *operation.in_body):
            if field.admin and field.name in values and "admin" not in key.scopes:
                raise Problem("scope", f"{field.name} needs the scope admin: with it, args and errors could be guessed")
        return await self._serve(operation, Ask(self._app, key, values), signed)

    async def _serve(self, operation: Operation, ask: Ask, signed: Signed) -> Response:
        chosen = await self._chosen(operation, ask)
        if operation.changes is not None:
            changed = await self._change(chosen[0].database, operation, ask, signed)
            return _json(changed.answer, changed.status)
        asked = (self._nodes.tried(at, partial(self._read, at.database, operation, ask, signed)) for at in chosen)
        found, away = sorted_out(await asyncio.gather(*asked))
        if not self._nodes.many or "job" in ask.values:
            return _json(found[chosen[0].name])
        return _json(merged(operation, ask, found, [one.name for one in away]))

    async def _chosen(self, operation: Operation, ask: Ask) -> list[At]:
        node = ask.get("node", "")
        if "job" in ask.values:
            return [await self._nodes.of_job(ask["job"])]
        if node and not self._nodes.many:
            raise Problem("invalid", "node: this API serves one database")
        if operation.changes is not None and self._nodes.many and not node:
            raise Problem("invalid", "node is missing", hint="Pass the name of the node")
        for field in operation.in_query:
            if field.of_node and field.name in ask.values and self._nodes.many and not node:
                reason = f"{field.name} is an id of one node, and node is missing"
                raise Problem("invalid", reason, hint="Pass the name of the node, and read the nodes one by one")
        return await self._nodes.chosen(node)

    async def _read(self, database: Database, operation: Operation, ask: Ask, signed: Signed) -> dict[str, Any]:
        assert operation.reads is not None
        async with database.act(None, READ_TIMEOUT) as conn:  # only the nonce would be in doubt
            await _fresh(conn, signed)
        async with database.read() as conn:
            return await operation.reads(ask, conn)

    async def _change(self, database: Database, operation: Operation, ask: Ask, signed: Signed) -> Changed:
        found: Changed | Exception | None = None
        try:
            async with database.act(operation.name) as conn:
                await _fresh(conn, signed)
                try:
                    async with conn.transaction():
                        done = await operation.change(ask, conn, "api")
                    found = done
                except Exception as error:
                    if conn.broken or conn.closed:
                        raise
                    found = error
        except CommitUnknown as error:
            if not isinstance(found, Changed) or found.action is None:  # the transaction had nothing but the nonce
                assert isinstance(error.__cause__, QueueUnavailable)
                raise error.__cause__ from None
            raise
        assert found is not None
        if isinstance(found, Exception):
            raise found
        return found


async def _fresh(conn: Conn, signed: Signed) -> None:
    """Use up the nonce. Raise a Problem if the request is late or early by the database's clock, or replayed."""
    said = await run(conn, NONCE_TAKE(signed.key, signed.nonce, signed.at))
    if said in ("late", "early"):
        where = "behind" if said == "late" else "ahead of"
        raise Problem(said, f"the request's timestamp is more than 300 s {where} the database's clock")
    if said != "fresh":
        hint = "Use a new nonce for each request"
        raise Problem("replayed", "a request with this nonce was served before", hint=hint)


def _json(answer: Mapping[str, Any], status: int = 200) -> Response:
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    return Response(text.encode(), status, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """Return the whole body. A Problem if it is compressed or exceeds 1 MB; reading stops there."""
    too_large = Problem("too_large", f"a body has at most {MAX_BYTES} bytes", headers={"Connection": "close"})
    for raw, value in request.headers.raw:
        name = raw.lower()
        if name == b"content-length" and (not value.isdigit() or int(value[:20]) > MAX_BYTES):
            raise too_large
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise Problem("media_type", "compressed bodies are not supported")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise too_large
    return bytes(body)


def parsed(body: bytes, content_types: list[bytes]) -> dict[str, Any]:
    """Return the JSON object in the body; an empty body is an empty object. A Problem for anything else."""
    if not body:
        return {}
    # Several headers are refused: they are joined by a comma, which no accepted value has.
    kind, _, more = (part.strip() for part in b",".join(content_types).decode("latin-1").lower().partition(";"))
    if kind != "application/json" or more not in ("", "charset=utf-8", 'charset="utf-8"'):
        raise Problem("media_type", "a body needs the header Content-Type: application/json")
    steps = (1 if bracket[0] in b"[{" else -1 for bracket in _BRACKET.finditer(_STRING.sub(b"", body)))
    if any(depth > MAX_DEPTH for depth in accumulate(steps)):
        raise Problem("malformed", f"the body is nested deeper than {MAX_DEPTH} levels")
    try:
        found = parse(body.decode())
    except (ValueError, RecursionError):
        reason = "the body is not JSON in UTF-8, or has a duplicate name or an invalid number"
        raise Problem("malformed", reason) from None
    if not isinstance(found, dict):
        raise Problem("invalid", "the body must be one JSON object")
    return found
